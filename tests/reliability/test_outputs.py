"""B9: standard output and error that break end no training; other commands end as Unix programs do."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_runs import Corpus, corpus
from tiny_qa import files
from tiny_runs import Toy, toy_trainer
from transformers import TrainerCallback

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability
_WHET = f"{shlex.quote(sys.executable)} -m whet"
_BROKEN = {
    "head": "{ WHET; echo $? > CODE; } | head -1",
    "reader gone before": "{ WHET; echo $? > CODE; } | true",
    "both to a reader that goes": "{ WHET 2>&1; echo $? > CODE; } | head -1",
    "output closed": "WHET >&-; echo $? > CODE",
    "error closed": "WHET 2>&-; echo $? > CODE",
    "all closed": "WHET <&- >&- 2>&-; echo $? > CODE",
    "output full": "WHET > /dev/full; echo $? > CODE",
    "error full": "WHET 2> /dev/full; echo $? > CODE",
    "both full": "WHET > /dev/full 2>&1; echo $? > CODE",
}


def _shell(line: str, command: str, folder: Path) -> tuple[int, str]:
    """Run the line in a shell; return the exit code that the command itself had, and what standard error said."""
    line = line.replace("WHET", command).replace("CODE", shlex.quote(str(folder / "code")))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    return int((folder / "code").read_text("ascii")), done.stderr


@pytest.mark.parametrize("how", _BROKEN)
def test_training_goes_on_when_its_outputs_break(corpus: Corpus, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    words = corpus.words(out, max_steps=3, save_steps=1, logging_steps=1, eval_steps=1)
    code, said = _shell(_BROKEN[how], f"{_WHET} {shlex.join(map(str, words))}", tmp_path)
    assert code == 0, said
    assert {"model.safetensors", "all_results.json", "checkpoint-3"} <= files(out)
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_closed_terminal_saves_and_leaves(corpus: Corpus, tmp_path: Path) -> None:
    """The bar of rich is on it; the kernel sends SIGHUP, and every write fails from then on."""
    out = tmp_path / "out"
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "whet", *map(str, corpus.words(out, max_steps=2000, eval_strategy="no"))]
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    deadline = time.monotonic() + 90
    while not (out / "checkpoint-8").exists() and time.monotonic() < deadline:
        os.set_blocking(master, False)
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(master)
    process.send_signal(signal.SIGHUP)  # what a session leader gets when its terminal goes
    assert process.wait(timeout=60) == 75
    assert (out / "checkpoint-8").exists()


@pytest.mark.parametrize(
    ("line", "code"), [("{ WHET; echo $? > CODE; } | true", 141), ("WHET > /dev/full; echo $? > CODE", 74),
                       ("WHET >&-; echo $? > CODE", 74)],
)  # fmt: skip
@pytest.mark.parametrize("command", ["doctor --no_measure", "qa -h", "qa --print-config", "demo --help", "--help"])
def test_other_commands_end_as_unix_programs_do(tmp_path: Path, command: str, line: str, code: int) -> None:
    found, said = _shell(line, f"{_WHET} {command}", tmp_path)
    assert found == code
    assert code != 74 or "whet: standard output: " in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


class _Prints(TrainerCallback):
    """As callbacks of users do."""

    def on_step_end(self, args, state, control, **_) -> None:
        print("step", state.global_step, flush=True)
        print("to error", file=sys.stderr, flush=True)


class _Broken:
    """A stream that a host program closed, or whose window is gone."""

    encoding = "utf-8"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    flush = isatty = lambda self: False

    def fileno(self) -> int:
        raise OSError


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space"), ValueError("closed")])
def test_prints_of_callbacks_end_no_training_in_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broken = _Broken(error)
    monkeypatch.setattr(sys, "stdout", broken)
    monkeypatch.setattr(sys, "stderr", broken)
    trainer = toy_trainer(tmp_path, model=Toy(), callbacks=[_Prints()], max_steps=2)
    assert trainer.train().global_step == 2
    assert sys.stdout is broken, "what was there before is there again"
