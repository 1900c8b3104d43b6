"""R6: a run that is told to stop saves what is done, leaves with 75, and goes on as if nothing had happened."""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from forked_runs import Child, Corpus, assert_equal_runs, corpus, finish, hook, qa, whole
from harness import SEED, trials_of

__all__ = ["corpus", "whole"]  # fixtures

pytestmark = pytest.mark.reliability
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STORM_S = 0.5
"""For so long signals follow the first; a second or more after it they would end the run at once."""
MOST_S, MOST_USED_S = 10.0, 3.0
"""From signal to exit, by the clock and in processor time: a step, a save and the teardown of Python take about 0.5 s;
ten runs may share the machine, which makes the clock's time no measure of the run."""
N_MICRO_BATCHES = 44
"""Of 24 steps: two each, but for the short last one of each of the four epochs."""
_NUMBERS = random.Random(6 + SEED)
_OBJECTIVE = "PackedSpans"


def _moments(n: int, first: int, last: int) -> list[tuple[int, signal.Signals]]:
    """Random calls of a function, each with one of the signals in turn."""
    return [(_NUMBERS.randint(first, last), SIGNALS[i % len(SIGNALS)]) for i in range(trials_of(n))]


class Took(NamedTuple):
    """From the signal to the end."""

    clock_s: float
    used_s: float
    """Processor time of all threads."""


def _stop(child: Child, number: int, *, again: bool = False) -> Took:
    """Send the signal when the hook is reached, and then others, too, if wanted; return what it took until the end."""
    assert child.until_told(), child.text()
    started_s, used_s = time.monotonic(), child.used_so_far_s()
    child.kill(number)
    others = iter(SIGNALS * 10_000)
    child.wait(every=lambda: child.kill(next(others)) if again and time.monotonic() - started_s < STORM_S else None)
    return Took(time.monotonic() - started_s, child.used_s - used_s)


def said(child: Child) -> str:
    (line,) = [line for line in child.text().splitlines() if line.startswith("whet: stopped")]
    return line


def go_on(child: Child) -> list[str]:
    """The words of the command to continue with, which stands alone on its line."""
    (line,) = [line for line in child.text().splitlines() if line.startswith("whet qa ")]
    words = shlex.split(line)
    return words[1:]


def _check_saved(child: Child, took: Took, out: Path, wanted: Path, log: Path) -> None:
    """It left with 75, lost no step, and the command that it names leads to the end of the run that nobody stopped."""
    assert child.code == 75, child.text()
    assert took.clock_s < MOST_S
    assert took.used_s < MOST_USED_S
    line = said(child)
    match = re.search(r"after step (\d+): saved in (\S+), no completed step is lost", line)
    assert match, line
    done = int(match[1])
    steps = [int(step) for step in re.findall(r"^step (\d+)/\d+  epoch", child.text(), re.MULTILINE)]
    assert steps == list(range(1, done + 1)), "what was logged is what is saved: each step once"
    assert Path(match[2]) == out / f"checkpoint-{done}"
    assert not (out / ".whet.lock").exists()
    assert not list(out.glob(".*")), "nothing half written is left"
    finish(go_on(child), log)
    assert_equal_runs(out, wanted)


def _in_micro_batch(call: int) -> Callable[[Callable[[], None]], None]:
    """Inside the given micro-batch of the training, between its forward and its backward pass."""
    return hook("whet.objectives.span", f"{_OBJECTIVE}.loss_sum", call)


@pytest.mark.parametrize(("call", "number"), _moments(9, 3, N_MICRO_BATCHES))
def test_in_a_step(corpus: Corpus, whole: Path, tmp_path: Path, call: int, number: int) -> None:
    """In a random micro-batch, the first or the second of its step; every other time a storm of signals follows."""
    child = qa(corpus.words(tmp_path / "out"), tmp_path / "log", _in_micro_batch(call))
    took = _stop(child, number, again=call % 2 == 0)
    _check_saved(child, took, tmp_path / "out", whole, tmp_path / "log2")


@pytest.mark.parametrize(("call", "number"), [(1, SIGNALS[0]), (2, SIGNALS[1]), (2, SIGNALS[2])])
def test_in_the_first_step(corpus: Corpus, whole: Path, tmp_path: Path, call: int, number: int) -> None:
    """Its first micro-batch is dropped: then no step is done, and there is nothing to save. Its last one ends it."""
    words = corpus.words(tmp_path / "out")
    child = qa(words, tmp_path / "log", _in_micro_batch(call))
    took = _stop(child, number)
    if call == 2:
        return _check_saved(child, took, tmp_path / "out", whole, tmp_path / "log2")
    _check_nothing_was_there(child, tmp_path / "out")
    finish(words, tmp_path / "log2")
    return assert_equal_runs(tmp_path / "out", whole)


@pytest.mark.parametrize(("call", "number"), _moments(6, 1, 20))
def test_in_an_evaluation(corpus: Corpus, whole: Path, tmp_path: Path, call: int, number: int) -> None:
    """At a random batch of the four evaluations between steps; it is done again from its first batch."""
    child = qa(corpus.words(tmp_path / "out"), tmp_path / "log", hook("whet.tasks.qa.judge", "top_spans", call))
    took = _stop(child, number)
    _check_saved(child, took, tmp_path / "out", whole, tmp_path / "log2")
    assert "during the evaluation" in said(child)


@pytest.mark.parametrize(("call", "number"), _moments(6, 1, 24))
def test_in_a_save(corpus: Corpus, whole: Path, tmp_path: Path, call: int, number: int) -> None:
    """Before a random file is on the disk: the save is completed, and not made twice."""
    child = qa(corpus.words(tmp_path / "out"), tmp_path / "log", hook("os", "fsync", call))
    took = _stop(child, number, again=call % 2 == 0)
    _check_saved(child, took, tmp_path / "out", whole, tmp_path / "log2")


@pytest.mark.parametrize("number", SIGNALS)
def test_while_tokenizing(corpus: Corpus, whole: Path, tmp_path: Path, number: int) -> None:
    words = corpus.words(tmp_path / "out", "--overwrite_cache")
    child = qa(words, tmp_path / "log", hook("whet.tasks.qa.windows", "make_windows", 1))
    _stop(child, number, again=True)
    _check_nothing_was_there(child, tmp_path / "out")
    finish(words, tmp_path / "log2")
    assert_equal_runs(tmp_path / "out", whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_importing(corpus: Corpus, tmp_path: Path, number: int) -> None:
    """A real launch, and the signal at a random moment of its imports, once the handlers are there."""
    words = [sys.executable, "-m", "whet", *corpus.words(tmp_path / "out")]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        while not _hears(process.pid, signal.SIGUSR1):
            assert process.poll() is None, (tmp_path / "log").read_text("utf-8")
            time.sleep(0.005)
        time.sleep(_NUMBERS.random() * 1.5)
        process.send_signal(number)
        assert process.wait(timeout=60) == 75, (tmp_path / "log").read_text("utf-8")
    assert "start again with the same command" in (tmp_path / "log").read_text("utf-8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "place", "call"),
    # Not Trainer.save_model: whoever patches that method has it called for checkpoints too.
    [("whet.watch.files", "write_model", 1), ("whet.engine.engine", "Engine.save_metrics", 2)],
)
def test_after_the_last_step(corpus: Corpus, whole: Path, tmp_path: Path, module: str, place: str, call: int) -> None:
    """A write of the model is completed, and the printed command only evaluates; after the last batch nothing is left
    to be interrupted, and the run ends as it would have."""
    child = qa(corpus.words(tmp_path / "out"), tmp_path / "log", hook(module, place, call))
    _stop(child, signal.SIGTERM)
    if place == "write_model":
        assert child.code == 75, child.text()
        assert "the trained model is in" in said(child)
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        finish(go_on(child), tmp_path / "log2")
        assert "resuming" not in (tmp_path / "log2").read_text("utf-8")
    assert child.code == (75 if place == "write_model" else 0), child.text()
    assert_equal_runs(tmp_path / "out", whole)


def test_nothing_is_saved_regularly_and_yet_nothing_is_lost(corpus: Corpus, tmp_path: Path) -> None:
    """With save_strategy no: a run that is stopped would be lost."""
    options = {"save_strategy": "no", "eval_strategy": "no"}
    finish(corpus.words(tmp_path / "whole", **options), tmp_path / "log0")
    child = qa(corpus.words(tmp_path / "out", **options), tmp_path / "log", _in_micro_batch(31))
    took = _stop(child, signal.SIGTERM)
    _check_saved(child, took, tmp_path / "out", tmp_path / "whole", tmp_path / "log2")


def test_a_run_that_shall_not_listen(corpus: Corpus, tmp_path: Path) -> None:
    words = corpus.words(tmp_path / "out", enable_jit_checkpoint="false")
    child = qa(words, tmp_path / "log", _in_micro_batch(31))
    _stop(child, signal.SIGTERM)
    assert child.code == -signal.SIGTERM


def test_the_command_that_goes_on_shows_no_token(corpus: Corpus, tmp_path: Path) -> None:
    words = corpus.words(tmp_path / "out", "--token=canary-1", token="canary-2")
    child = qa(words, tmp_path / "log", _in_micro_batch(5))
    _stop(child, signal.SIGTERM)
    assert child.code == 75
    assert "--resume_from_checkpoint auto" in child.text()
    assert "canary" not in child.text()


def _check_nothing_was_there(child: Child, out: Path) -> None:
    assert child.code == 75, child.text()
    assert "start again with the same command" in said(child)
    left = {path.name for path in out.iterdir()} if out.exists() else set()
    assert left <= {"run.log", "run.jsonl"}, "the same command finds what it found"


def _hears(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)
