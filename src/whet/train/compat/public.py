"""The attributes and methods of a Trainer that other modules use. The Trainer may be of a user's subclass.

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
    """The interface of a Trainer for the modules that serve it. A user may have overridden its methods."""

    args: TrainingArguments
    given_args: Any
    callbacks_args: TrainingArguments
    model_args: TrainingArguments
    model: nn.Module
    model_init: Callable[..., nn.Module] | None
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
    made_optimizers: tuple[Any, Any]
    optimizer_cls_and_kwargs: Any
    evaluation: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    ignore_keys_for_eval: list[str] | None
    search: Any
    trial: Any
    user_loss: bool
    label_names: list[str]
    label_smoother: Any
    loss_shifts_labels: bool
    loss_is_scaled_for_ga: bool | None
    model_accepts_loss_kwargs: bool
    can_return_loss: bool
    compute_loss_func: Any
    current_gradient_accumulation_steps: int
    hub_model_id: str | None

    @property
    def device(self) -> torch.device: ...
    def train(self, *args: Any, **kwargs: Any) -> Any: ...
    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
    def forward_batches(self, *args: Any, **kwargs: Any) -> Any: ...
    def use_arguments(self, *args: Any, **kwargs: Any) -> Any: ...
    def log(self, *args: Any, **kwargs: Any) -> Any: ...
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...
    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def floating_point_ops(self, *args: Any, **kwargs: Any) -> Any: ...
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any: ...
    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any: ...
    def create_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_optimizer_cls_and_kwargs(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_decay_parameter_names(self, *args: Any, **kwargs: Any) -> Any: ...
    def save_model(self, *args: Any, **kwargs: Any) -> Any: ...
    def init_hf_repo(self, *args: Any, **kwargs: Any) -> Any: ...
    def create_model_card(self, *args: Any, **kwargs: Any) -> Any: ...
