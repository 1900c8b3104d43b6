"""How the learning rate moves over a run: transformers' schedules, built from the run's length."""

import math
from typing import Any

from torch.optim import Optimizer
from transformers import get_scheduler

from whet.config.arguments import TrainingArguments


def warmup_steps(args: TrainingArguments, n_steps: int) -> int:
    """Return the steps of warm-up: `warmup_steps` (a fraction of the run below 1), else `warmup_ratio` of the run."""
    asked = args.warmup_steps
    if asked >= 1:
        return int(asked)
    return math.ceil((asked or args.warmup_ratio or 0.0) * n_steps)


def build(optimizer: Optimizer, args: TrainingArguments, n_steps: int) -> Any:
    """Return the learning rate scheduler of the run; it is stepped once an optimizer step."""
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup_steps(args, n_steps),
        num_training_steps=n_steps,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )
