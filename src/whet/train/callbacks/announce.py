"""Prints the first lines of a run, and its table at the end."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from whet.train.callbacks import progress
from whet.train.compat.public import PublicTrainer
from whet.train.output import printing, run_log, start_block, table


class Announcer(TrainerCallback):
    """Prints what a Trainer is about to do, and its results."""

    def __init__(self, trainer: PublicTrainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._evaluates = False
        self._results: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            self._evaluates, self._results = True, {}
            self._show(start_block.of_training(trainer))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        if "train_runtime" in logs:
            self._results = dict(logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._results and not printing.table_follows():
            self._show(
                table.lines(table.TRAINING, self._results, args.output_dir if args.save_strategy != "no" else None)
            )
        self._results = {}

    def expect_training(self) -> None:
        """Print no lines of a pass before the first step: a training follows, which prints its own."""
        self._evaluates = True

    def announce_evaluation(self, dataset: Any) -> None:
        """Print the lines of an evaluation or prediction, once, unless a training printed its own."""
        trainer = self._trainer()
        if not self._evaluates and trainer is not None:
            self._evaluates = True
            self._show(start_block.of_evaluation(trainer, dataset))

    def _show(self, lines: Sequence[str]) -> None:
        """Print the lines; only write them to run.log if the callback that shows the run was removed."""
        trainer = self._trainer()
        shown = trainer is not None and any(isinstance(one, progress.SHOWS) for one in trainer.events.callbacks)
        (printing.show if shown else run_log.write)(lines)
