"""Workers in a run: their threads end with it, however it ends, and the log says what does nothing."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import toy_rows, toy_trainer
from transformers import TrainerCallback

from whet.data.prefetch import NAME
from whet.watch.stop import Stopped


def _workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


class _At(TrainerCallback):
    """Does something after a step, and counts the workers at each."""

    def __init__(self, step: int = 0, do: Callable[[], Any] = lambda: None) -> None:
        self.step, self.do = step, do
        self.n_workers: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.n_workers.append(len(_workers()))
        if state.global_step == self.step:
            self.do()


class _BadRow:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        if row == 9:
            raise FileNotFoundError("row 9 is on a disk that is gone")
        return self.rows[row]


def test_an_error_of_a_worker_ends_the_run_at_its_step(tmp_path: Path) -> None:
    seen = _At()
    workers = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}
    trainer = toy_trainer(tmp_path, train_dataset=_BadRow(toy_rows(16)), callbacks=[seen], **workers)
    with pytest.raises(FileNotFoundError, match="row 9 is on a disk that is gone"):
        trainer.train()
    assert trainer.state.global_step == 2  # rows 8 to 11 are those of the third step
    assert max(seen.n_workers) >= 1
    assert _workers() == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_threads_end_with_a_run_that_breaks(tmp_path: Path, error: BaseException) -> None:
    def broken() -> None:
        raise error

    trainer = toy_trainer(tmp_path, dataloader_num_workers=2, num_train_epochs=5, callbacks=[_At(4, broken)])
    with pytest.raises(type(error)):
        trainer.train()
    assert _workers() == []


def test_a_signal_saves_and_ends_the_threads(tmp_path: Path) -> None:
    at_step_4 = _At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = toy_trainer(
        tmp_path / "out",
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        num_train_epochs=50,
        enable_jit_checkpoint=True,
        callbacks=[at_step_4],
    )
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 4"):
        trainer.train()
    assert max(at_step_4.n_workers) >= 1
    assert _workers() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_epoch_unless_they_persist(tmp_path: Path, persistent: bool) -> None:
    """While an epoch ends, with its evaluation, nothing is made ahead unless that was asked for."""
    at_ends: list[bool] = []

    class AtEpochEnds(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_ends.append(bool(_workers()))

    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent}
    toy_trainer(tmp_path, num_train_epochs=3, callbacks=[AtEpochEnds()], **workers).train()
    assert at_ends == [persistent, persistent, False]


@pytest.mark.parametrize(("asked", "notes"), [(None, 0), (False, 0), (True, 1)])
def test_pinned_memory_on_a_cpu_is_noted_where_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: bool | None, notes: int
) -> None:
    given = {} if asked is None else {"dataloader_pin_memory": asked}
    with caplog.at_level(logging.INFO):
        toy_trainer(tmp_path, **given).train()
    assert sum("dataloader_pin_memory has no effect" in text for text in caplog.messages) == notes
