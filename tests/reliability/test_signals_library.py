"""Signals where whet is a library: nobody's Ctrl-C is taken, unless the arguments say so, and then it is given back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_runs  # noqa: F401 - it knows where tiny_runs is
import pytest
from tiny_runs import Toy, assert_same_weights, checkpoints, entries, toy_rows, toy_trainer
from transformers import TrainerCallback

from whet.errors import ConfigError
from whet.watch import stop

pytestmark = pytest.mark.reliability
_RUN: dict[str, Any] = {
    "train_dataset": toy_rows(48), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "logging_steps": 1, "num_train_epochs": 1,
}  # fmt: skip
"""12 steps of two micro-batches."""


class Send(TrainerCallback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM, event: str = "on_substep_end") -> None:
        self.step = step
        self.number = number
        setattr(self, event, self._send)

    def _send(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.step = -1  # once
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a notebook: a shell starts what it puts in the background with SIGINT ignored, this process too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without nohup
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hang_up)


def _whole(folder: Path, **changes: Any) -> Any:
    trainer = toy_trainer(folder, model=Toy(dropout=0.1), **(_RUN | changes))
    trainer.train()
    return trainer


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_trainer_that_is_told_to_listens(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    before = [signal.getsignal(one) for one in stop.SIGNALS]
    trainer = toy_trainer(
        tmp_path / "out", model=Toy(dropout=0.1), callbacks=[Send(7, number)], enable_jit_checkpoint=True, **_RUN
    )
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 75
    assert [signal.getsignal(one) for one in stop.SIGNALS] == before
    assert stop.requested() is None, "the next run starts without a signal"
    assert "resume_from_checkpoint='auto'" in caplog.text
    assert checkpoints(tmp_path / "out") == ["checkpoint-7"]
    again = toy_trainer(tmp_path / "out", model=Toy(dropout=0.1), **_RUN)
    again.train(resume_from_checkpoint="auto")
    whole = _whole(tmp_path / "whole")
    assert_same_weights(again.model, whole.model)
    assert entries(again, "loss") == entries(whole, "loss")


def test_by_default_the_handlers_stay_whose_they_are(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.extend(signal.getsignal(one) for one in stop.SIGNALS)

    before = [signal.getsignal(one) for one in stop.SIGNALS]
    toy_trainer(tmp_path, callbacks=[Look]).train()
    assert seen == before * 3


@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_save", "on_evaluate"])
def test_an_interrupted_notebook_can_go_on(tmp_path: Path, event: str) -> None:
    """Ctrl-C is a KeyboardInterrupt out of train(); the same Trainer then goes on from its newest checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    trainer = toy_trainer(
        tmp_path / "out", model=Toy(dropout=0.1), callbacks=[Send(6, signal.SIGINT, event)], **(_RUN | saving)
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters()), "half a step would be added later"
    assert not list((tmp_path / "out").glob(".*")), "neither a lock nor half a checkpoint"
    trainer.train(resume_from_checkpoint="auto")
    assert_same_weights(trainer.model, _whole(tmp_path / "whole", **saving).model)


def test_listening_in_another_thread_is_refused(tmp_path: Path) -> None:
    """Python gives signals to the main thread alone: the promise could not be kept."""
    raised: list[BaseException] = []

    def train() -> None:
        try:
            toy_trainer(tmp_path, enable_jit_checkpoint=True).train()
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "thread" in str(raised[0])
    other = threading.Thread(target=lambda: toy_trainer(tmp_path).train())
    other.start()
    other.join()


def test_a_run_that_a_callback_ended_does_not_begin_again(tmp_path: Path) -> None:
    """The signal comes with the wish to stop: after resuming nothing is left to be done but the end."""

    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                control.should_training_stop = True

    stopped = toy_trainer(
        tmp_path / "out", callbacks=[Enough, Send(5, event="on_step_end")], enable_jit_checkpoint=True, **_RUN
    )
    with pytest.raises(SystemExit):
        stopped.train()
    assert toy_trainer(tmp_path / "out", **_RUN).train(resume_from_checkpoint="auto").global_step == 5


def _survives(prepare: Callable[[], None]) -> bool:
    """Return whether a forked worker of a listening process lives on after all three signals."""
    stop.install(deferred=False)
    reading, writing = os.pipe()
    try:
        worker = os.fork()
        if not worker:
            prepare()
            os.write(writing, b".")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)
        for number in stop.SIGNALS:
            os.kill(worker, number)
        time.sleep(0.2)
        lives = os.waitpid(worker, os.WNOHANG) == (0, 0)
        os.kill(worker, signal.SIGKILL)
        if lives:
            os.waitpid(worker, 0)
        return lives
    finally:
        stop.restore()
        os.close(reading)
        os.close(writing)


def test_workers_let_signals_pass() -> None:
    """A signal reaches the whole process group; the run needs its loaders until it has left by itself."""
    assert _survives(stop.ignore)
    assert _survives(lambda: None), "a forked one does so by itself"
