"""Runs of `whet qa` in forked processes: everything heavy is imported once, so that a trial takes part of a second.

What is forked is real: the program's own `main`, its handlers, its files, its exit code. A child may carry a hook,
which tells the test over a pipe that a function was entered, and stays there until a signal sent by the test has been
heard, or until a file is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import command, save_encoder, squad, write_json

SOAK = os.environ.get("WHET_SOAK") == "1"
"""Whether the night size was asked for."""
LIMIT_S = 300.0
"""A child that lives longer hangs, on however busy a machine."""
HEAVY = ("whet.tasks.qa.job", "whet.jobs.run", "transformers.models.bert.modeling_bert")


@dataclass
class Corpus:
    """What every run begins with: an encoder, questions, and a cache of their windows."""

    folder: Path

    def words(self, output: Path, *more: Any, **options: Any) -> list[str]:
        """The words of a `whet qa` command that trains 24 steps of two micro-batches, evaluates and saves."""
        data = self.folder / "v1.json"
        usual: dict[str, Any] = {
            "train_file": data, "validation_file": data, "per_device_train_batch_size": 6, "max_steps": 24,
            "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 6, "logging_steps": 1,
            "save_strategy": "steps", "save_steps": 8,
        }  # fmt: skip
        return command(self.folder / "encoder", output, "--do_train", "--do_eval", *more, **(usual | options))


@dataclass
class Child:
    """A forked process."""

    pid: int
    log: Path
    told: int
    """The pipe's end on which its hook tells that it is there."""
    code: int | None = None
    used_s: float = 0.0
    """Processor time of all its threads, once it has ended."""

    def used_so_far_s(self) -> float:
        """Processor time of all its threads until now, to a hundredth of a second."""
        ticks = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def kill(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def until_told(self) -> bool:
        """Wait until the hook was reached; False where the process ended without."""
        return os.read(self.told, 1) != b""

    def ended(self) -> bool:
        if self.code is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            self.used_s = used.ru_utime + used.ru_stime
        return self.code is not None

    def wait(self, every: Callable[[], None] = lambda: None, pause_s: float = 0.005, limit_s: float = LIMIT_S) -> int:
        """Return the exit code, calling `every` again and again until it is there."""
        deadline = time.monotonic() + limit_s
        while not self.ended():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"it does not end:\n{self.text()}")
            every()
            time.sleep(pause_s)
        os.close(self.told)
        assert self.code is not None
        return self.code

    def text(self) -> str:
        """All that it printed to standard output and error."""
        return self.log.read_text("utf-8", errors="replace")


def fork(work: Callable[[], Any], log: Path, prepare: Callable[[Callable[[], None]], None] | None = None) -> Child:
    """Do the work in a child, whose exit code is that of the SystemExit it raises; `prepare(tell)` comes before."""
    for name in HEAVY:
        import_module(name)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, log, reading)
    code = 99
    try:
        os.close(reading)
        _alone(log)
        if prepare is not None:
            prepare(lambda: os.write(writing, b"."))
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def qa(words: list[str], log: Path, prepare: Callable[[Callable[[], None]], None] | None = None) -> Child:
    """Start `whet qa` with these words."""
    from whet.cli.main import main

    return fork(lambda: main(words), log, prepare)


def _alone(log: Path) -> None:
    """Make the child look like a new process: its own output, nobody's signal handlers, no log of the tests."""
    from whet.log import logger

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logger.handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def hook(module: str, name: str, call: int, until: Path | None = None) -> Callable[[Callable[[], None]], None]:
    """Return what makes a child tell of the given call (from 1) of a function, and stay there.

    It goes on when the file `until` is there; without one when it has heard a signal, or after a second.
    """
    *owners, last = name.split(".")

    def prepare(tell: Callable[[], None]) -> None:
        home = reduce(getattr, owners, import_module(module))
        stop = import_module("whet.watch.stop")
        stay_s = 1.0 if until is None else LIMIT_S
        real, count = getattr(home, last), 0

        def hooked(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                tell()
                deadline = time.monotonic() + stay_s
                while time.monotonic() < deadline and not (until.exists() if until else stop.requested()):
                    time.sleep(0.001)  # a signal is heard between two of them
            return real(*given, **named)

        setattr(home, last, hooked)

    return prepare


def history(folder: Path) -> list[dict[str, Any]]:
    """The log of a finished run without what a clock says."""
    state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
    timed = ("runtime", "per_second")
    entries = [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in state["log_history"]]
    return [entry for entry in entries if not any(name.startswith("train_") for name in entry)]


def assert_equal_runs(found: Path, wanted: Path) -> None:
    """Bitwise the same weights, the same log, the same answers."""
    assert history(found) == history(wanted)
    for name in ("model.safetensors", "eval_predictions.json", "eval_nbest_predictions.json"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes(), name


def finish(words: list[str], log: Path) -> None:
    """Run the command to its end."""
    child = qa(words, log)
    assert child.wait() == 0, child.text()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The encoder and its questions, made in a child: the process that forks all others stays as it is."""
    folder = tmp_path_factory.mktemp("corpus")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")

    def make() -> None:
        save_encoder(folder / "encoder")
        write_json(folder / "v1.json", squad())

    assert fork(make, folder / "log").wait() == 0, (folder / "log").read_text("utf-8")
    return Corpus(folder)


@pytest.fixture(scope="session")
def whole(corpus: Corpus) -> Path:
    """The output folder of the run that nobody stopped."""
    finish(corpus.words(corpus.folder / "whole"), corpus.folder / "whole.log")
    return corpus.folder / "whole"
