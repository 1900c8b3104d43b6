"""The facts of one training run. They do not change during the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.config.arguments import TrainingArguments
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

    @property
    def output_dir(self) -> Path:
        """The folder of the run's checkpoints and results."""
        return Path(self.args.output_dir)
