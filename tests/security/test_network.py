"""Nothing here needs a network, and nothing reaches for one: no connection is tried in a run on local files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_qa import command, squad, write_json

from not_shown import not_shown

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.reliability
_EMPTY = ("unshare", "-rn")
_SUITE = ("tests/qa/test_prediction_files.py", "tests/qa/test_squad_hub.py", "tests/train/test_checkpoint_folder.py")


@pytest.fixture
def empty_network() -> tuple[str, ...]:
    """The words before a command that run it where there is no network at all."""
    if (
        shutil.which(_EMPTY[0]) is None
        or subprocess.run([*_EMPTY, "true"], check=False, capture_output=True).returncode
    ):
        not_shown("S7", "unshare -rn makes no network name space", "unshare (util-linux) and user name spaces")
    return _EMPTY


def _run(folder: Path, encoder: Path) -> Path:
    data = write_json(folder / "train.json", squad())
    options = {"train_file": data, "validation_file": data, "test_file": data, "max_steps": 2}
    return write_json(folder / "c.json", command(encoder, folder / "out", "--do_train", "--do_eval", "--do_predict",
                                                 **options))  # fmt: skip


def test_a_run_on_local_files_tries_no_connection(encoder: Path, tmp_path: Path, watched) -> None:
    """Online as far as the settings go: HF_HUB_OFFLINE is taken away."""
    report = watched("qa_runs", _run(tmp_path, encoder), env={"HF_HUB_OFFLINE": "0"})
    print(f"\nconnections tried: {len(report['seen']['connections'])}")
    assert (report["result"], report["seen"]["connections"]) == ([0], [])


def test_a_run_works_without_any_network(encoder: Path, tmp_path: Path, watched, empty_network) -> None:
    report = watched("qa_runs", _run(tmp_path, encoder), env={"HF_HUB_OFFLINE": "0"}, prefix=empty_network)
    assert report["result"] == [0]


def test_the_suite_passes_without_any_network(tmp_path: Path, empty_network) -> None:
    """A part of it, by time; the whole is `unshare -rn python -m pytest`."""
    words = [*empty_network, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_SUITE]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
