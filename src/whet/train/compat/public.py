"""The attributes and methods of a Trainer that other modules use.

Modules that the Trainer imports take this protocol instead of the class, which avoids a circle of imports.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.objectives.base import Objective
from whet.precision.policy import Precision
from whet.train.callbacks.events import Events
from whet.train.sync import Sync


class PublicTrainer(Protocol):
    """The interface of a Trainer for the modules that serve it."""

    args: TrainingArguments
    model: nn.Module
    model_with_new_layers: weakref.ref[nn.Module] | None
    objective: Objective
    precision: Precision
    why_precision: str
    auto_as_in: str
    sync: Sync
    evaluated_weights: Callable[[], AbstractContextManager[None]]
    before_steps: Callable[[], None]
    clock: Any
    events: Events
    state: TrainerState
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    padded_length: int | None
    data_collator: Any
    collator_given: bool
    collate: Any
    optimizer: Any
    lr_scheduler: Any
    given_optimizers: tuple[Any, Any]
    evaluation: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any

    @property
    def device(self) -> torch.device: ...
    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
    def forward_batches(self, *args: Any, **kwargs: Any) -> Any: ...
    def log(self, *args: Any, **kwargs: Any) -> Any: ...
