"""A run of `whet classify` that is killed resumes from its checkpoint and ends with bitwise the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from text_tasks import load, topic_rows, words, write_csv

_DEADLINE_S = 300.0


def _process(line: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "whet", *line], stdout=file, stderr=file)


def _wait_for(folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the checkpoint is complete; fail if the process ends before."""
    give_up = time.monotonic() + _DEADLINE_S
    while not (folder / "MANIFEST.json").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.05)


@pytest.mark.reliability
@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_resumes_bitwise(sentence_encoder: Path, tmp_path: Path, kill: signal.Signals) -> None:
    file = write_csv(tmp_path / "topics.csv", topic_rows())
    options = {
        "train_file": file,
        "validation_file": file,
        "max_steps": 600,
        "save_strategy": "steps",
        "save_steps": 20,
    }
    line = words("classify", sentence_encoder, tmp_path / "whole", "--do_train", "--do_eval", **options)
    assert subprocess.run([sys.executable, "-m", "whet", *line], capture_output=True, check=False).returncode == 0
    cut, log = tmp_path / "cut", tmp_path / "log"
    line = words("classify", sentence_encoder, cut, "--do_train", "--do_eval", **options)
    process = _process(line, log)
    _wait_for(cut / "checkpoint-20", process, log)
    os.kill(process.pid, kill)
    assert process.wait(_DEADLINE_S) != 0, "the run was over before it could be killed"
    assert not (cut / "model.safetensors").exists()
    assert _process([*line, "--resume_from_checkpoint", "auto"], log).wait(_DEADLINE_S) == 0, log.read_text()
    found, wanted = (load_file(folder / "model.safetensors") for folder in (cut, tmp_path / "whole"))
    assert found.keys() == wanted.keys()
    assert all(equal(found[name], wanted[name]) for name in wanted)
    assert load(cut, "eval_results.json")["eval_loss"] == load(tmp_path / "whole", "eval_results.json")["eval_loss"]
