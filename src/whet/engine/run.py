"""The facts of one training run, and its counters. The facts do not change during the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.config.ranks import Place
from whet.data.order import StepOrder
from whet.engine.sync import Sync
from whet.objectives.base import Objective


@dataclass(frozen=True)
class Interval:
    """How often the run logs, evaluates or saves."""

    strategy: str
    every: int
    """Steps between two times: those of an epoch for "epoch", 0 if the strategy has no fixed interval."""
    begins: float = 0.0
    """No time comes before this step."""

    def due(self, done: int, epoch_ends: bool) -> bool:
        """Return whether it is due after `done` steps."""
        if done < self.begins:
            return False
        return epoch_ends if self.strategy == "epoch" else self.every > 0 and done % self.every == 0

    def times_left(self, done: int, n_steps: int) -> int:
        """Return how often it will be due once `done` of the run's steps are taken, right after the last of them too.

        The last step of the run counts, as runs end so.
        """
        before = max(done, math.ceil(self.begins), 1) - 1
        return -(-n_steps // self.every) - before // self.every if self.every and before < n_steps else 0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The steps of a run, and when it logs, evaluates and saves."""

    order: StepOrder
    order_rule: str | None
    """What the order of rows depends on, apart from the settings that a resume compares; None if nothing."""
    n_steps: int
    n_epochs: int
    log: Interval
    evaluate: Interval
    save: Interval


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model that is ready to be trained or evaluated, with its objective, data, settings and ranks."""

    args: TrainingArguments
    model: nn.Module
    objective: Objective
    sync: Sync
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    """The tokenizer or processor, which is saved next to the weights."""
    padded_length: int | None = None
    """The length that rows would be padded to without packing; None: that of the longest row in their batch."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Small files by name that each checkpoint holds, next to what every model has."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    @property
    def place(self) -> Place:
        """Which of the ranks that train together this process is."""
        return self.sync.place

    @property
    def output_dir(self) -> Path:
        """The folder of the run's checkpoints and results."""
        return Path(self.args.output_dir)


@dataclass(frozen=True, kw_only=True)
class Run(Prepared):
    """One training of a prepared model, by a plan."""

    plan: RunPlan
    is_trial: bool = False
    """Whether some steps are only timed: nobody reads their results, and nothing of them is kept on a disk."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def new_counters(args: TrainingArguments, place: Place) -> TrainerState:
    """Return the counters of a run that has not begun."""
    return TrainerState(
        train_batch_size=args.per_device_train_batch_size,
        is_world_process_zero=place.is_first,
        is_local_process_zero=place.local_rank == 0,
    )


def reset(counters: TrainerState, plan: RunPlan) -> None:
    """Set the counters of a run to those before its first step."""
    counters.max_steps, counters.num_train_epochs = plan.n_steps, plan.n_epochs
    counters.logging_steps = plan.log.every
    counters.eval_steps, counters.save_steps = plan.evaluate.every, plan.save.every
    counters.global_step, counters.epoch, counters.total_flos = 0, 0.0, 0.0
