"""`whet demo-lm`: it runs again in its own folder, and replaces nobody's work."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.tasks.lm.arguments import DemoLmArguments
from whet.tasks.lm.task import DEMO


@pytest.mark.night
def test_demo_learns_prints_a_text_and_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = DemoLmArguments(output_dir=str(tmp_path / "demo"), max_steps=30)
    for _ in range(2):
        assert DEMO.run(demo) == 0
        said = " ".join(capsys.readouterr().out.split())
        before, after = said.partition("perplexity before training ")[2].split(", after ")
        assert int(after.split()[0].replace(",", "")) < int(before.replace(",", ""))
        assert "whet generate" in said


def test_demo_keeps_checkpoints_and_files_of_others(tmp_path: Path) -> None:
    demo = DemoLmArguments(output_dir=str(tmp_path / "demo"), max_steps=2)
    DEMO.run(demo)
    assert "Worst examples" in (tmp_path / "demo" / "report.html").read_text("utf-8")
    (tmp_path / "demo" / "checkpoint-2").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine", "utf-8")
    for name in ("demo", "other"):
        with pytest.raises(ConfigError, match="not of a demo"):
            DEMO.run(DemoLmArguments(output_dir=str(tmp_path / name), max_steps=2))
    assert (tmp_path / "demo" / "checkpoint-2").exists()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


def _run(
    folder: Path, number: int | None = None, when: Callable[[str], bool] = bool, steps: int = 150
) -> tuple[int, str]:
    """Run the demo in a process; send the signal at the first line for which `when` is true. Return code and output."""
    words = [sys.executable, "-m", "whet", "demo-lm", "--output_dir", str(folder), "--max_steps", str(steps)]
    lines = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if number is not None and re.match(r"step [1-9]", line) and when(line):
                process.send_signal(number)
                number = None
    return process.returncode, "".join(lines)


def _step_of_checkpoint(folder: Path) -> int:
    (checkpoint,) = folder.glob("checkpoint-*")
    return int(checkpoint.name.partition("-")[2])


@pytest.mark.slow
@pytest.mark.night
def test_an_interrupted_demo_continues_and_a_finished_one_begins_again(tmp_path: Path) -> None:
    """Killed after a checkpoint of its own, stopped by Ctrl-C, continued; other steps begin again in between."""
    folder = tmp_path / "demo"
    code, said = _run(folder, signal.SIGKILL, lambda _: any(folder.glob("checkpoint-*")))
    assert code == -signal.SIGKILL, said
    done = _step_of_checkpoint(folder)
    code, said = _run(folder, signal.SIGINT)
    assert code == 75, said
    assert f"Continues the demo that was interrupted in {folder}, after step {done}." in said
    assert f"resumes    after step {done} of 150" in said
    assert "the same command continues the demo" in said
    stopped = _step_of_checkpoint(folder)
    assert stopped > done
    code, said = _run(folder)
    assert code == 0, said
    assert f"resumes    after step {stopped} of 150" in said
    assert "perplexity before training" in said
    history = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [25, 50, 75, 100, 125, 150]
    assert not [*folder.glob("checkpoint-*")]
    code, said = _run(folder, signal.SIGTERM)
    assert (code, "Continues" in said) == (75, False)
    code, said = _run(folder, steps=2)
    assert (code, "Continues" in said, [*folder.glob("checkpoint-*")]) == (0, False, [])
