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
from whet.cli.main import run

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


def test_command_in_a_new_pod_continues_and_its_settings_file_names_the_first_checkpoint(
    sentence_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file counts as long as the folder has no later checkpoint of the run that began there."""
    file = write_csv(tmp_path / "topics.csv", topic_rows())
    options = {"train_file": file, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    base = words("classify", sentence_encoder, tmp_path / "base", "--do_train", **options, max_steps=4)
    assert run(base) == 0
    settings = tmp_path / "run.yaml"
    settings.write_text(f"resume_from_checkpoint: {tmp_path / 'base' / 'checkpoint-2'}\n", "utf-8")
    monkeypatch.setenv("WHET_RESUME", "auto")
    capsys.readouterr()
    for step, max_steps in ((2, 6), (6, 8)):
        line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", **options, max_steps=max_steps)
        assert run([*line, "--config", str(settings)]) == 0
        assert f"resumes    after step {step} of {max_steps}" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("abandoned-*"))
    for job, step, max_steps in (("b" * 32, 2, 6), ("b" * 32, 6, 8), ("c" * 32, 2, 4)):
        monkeypatch.setenv("WHET_LAUNCH_ID", job)
        line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", **options, max_steps=max_steps)
        assert run([*line, "--config", str(settings)]) == 0
        said = capsys.readouterr().out
        assert f"resumes    after step {step} of {max_steps}" in said, "what another job has saved is not this one's"
    monkeypatch.delenv("WHET_LAUNCH_ID")
    plain = words("classify", sentence_encoder, tmp_path / "base", "--do_train", **options, max_steps=6)
    assert run(plain) == 0, "nothing is asked for: the newest"
    assert "resumes    after step 4 of 6" in capsys.readouterr().out
    assert run([*plain, "--overwrite_output_dir"]) == 78


def test_restarted_command_passes_over_checkpoints_that_no_run_can_resume_from(
    sentence_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It continues from the complete one before those of the model alone; without one it begins again."""
    file = write_csv(tmp_path / "topics.csv", topic_rows())
    options = {"train_file": file, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}

    def train(name: str, max_steps: int, *flags: str, **more: str) -> int:
        usual = options | {"max_steps": max_steps} | more
        return run(words("classify", sentence_encoder, tmp_path / name, "--do_train", *flags, **usual))

    assert train("some", 2) == train("some", 4, "--resume_from_checkpoint", "auto", save_only_model="true") == 0
    assert train("none", 4, save_only_model="true") == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    assert train("some", 6, save_only_model="true") == 0
    said = capsys.readouterr()
    assert "resumes    after step 2 of 6" in said.out
    assert "no run can resume from checkpoint-4, of transformers or of the model alone" in " ".join(said.err.split())
    assert train("none", 6, save_only_model="true") == 0
    said = capsys.readouterr()
    assert "resumes " not in said.out
    assert "no run can resume from checkpoint-2, checkpoint-4, of" in " ".join(said.err.split())
