"""A rank whose work is done ends with its exit code, whatever destructors of native libraries would do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny_qa
from many import ends, start

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls abort of the C library")

_AT_EXIT = """\
import atexit, ctypes, sys, threading
c = ctypes.CDLL(None)
c.__cxa_atexit(c.abort, None, None)  # as a thread of gloo that meets a library which is already taken down

def late():
    threading.main_thread().join()
    print("a thread ended", flush=True)

if "whet" in " ".join(sys.orig_argv):
    threading.Thread(target=late).start()
    atexit.register(lambda: print("atexit ran"))
"""
_WORDS = ("-m", "whet", "qa", "--do_train", "--max_steps", "1", "--max_seq_length", "40", "--doc_stride", "12")


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.night), 2])
def test_rank_ends_with_its_exit_code_before_native_libraries_are_taken_down(
    n_ranks: int, tmp_path: Path, encoder: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_AT_EXIT, "utf-8")
    (tmp_path / "questions.json").write_text(json.dumps(tiny_qa.squad()), "utf-8")
    words = (*_WORDS, "--model_name_or_path", str(encoder), "--train_file", "questions.json", "--output_dir", "out")
    ranks = ends(start(n_ranks, words, tmp_path, PYTHONPATH=str(tmp_path)))
    by_native_library = -6  # a process alone ends as Python does: nothing of gloo runs in it
    assert [rank.code for rank in ranks] == ([by_native_library] if n_ranks == 1 else [0, 0]), ranks[-1].err
    assert all("a thread ended" in rank.out and "atexit ran" in rank.out for rank in ranks)
