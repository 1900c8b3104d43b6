"""The facts of one training run. They do not change during the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.config.ranks import ALONE, Place
from whet.objectives.base import Objective
from whet.train.batches.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run trains, on which data, by which plan and settings."""

    args: TrainingArguments
    model: nn.Module
    device: torch.device
    objective: Objective
    plan: RunPlan
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    place: Place = ALONE
    """Which of the ranks that train together this process is."""

    @property
    def output_dir(self) -> Path:
        """The folder of the run's checkpoints and results."""
        return Path(self.args.output_dir)


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
