"""The same run by others: transformers' own Trainer, and the loop of a textbook, both on padded batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import engine
from tiny import Pad
from whet.data.store import RowStore

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None

SETTINGS: dict[str, Any] = {
    "max_steps": 50,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
}
"""One run, in the names that whet and transformers share."""


@dataclass
class Curve:
    """What each step of a run was."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model computes itself."""
    return model(**batch).loss


Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class _RecordingTrainer(transformers.Trainer):
    """transformers' Trainer with a loss of ours, which keeps the loss of each step at full precision."""

    def __init__(self, loss: Loss, **given: Any) -> None:
        super().__init__(**given)
        self.own_loss = loss
        self.losses: list[float] = []

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        loss = self.own_loss(model, dict(inputs))
        self.losses.append(loss.item())
        return loss


def transformers_run(model: Any, rows: RowStore, folder: Path, loss: Loss) -> Curve:
    """Train the model with transformers' Trainer."""
    args = transformers.TrainingArguments(output_dir=str(folder), remove_unused_columns=False, **SETTINGS)
    collator = Pad(model.config.pad_token_id)
    trainer = _RecordingTrainer(loss, model=model, args=args, train_dataset=rows, data_collator=collator)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return Curve(trainer.losses, norms)


def textbook_run(model: Any, rows: RowStore, _: Path, loss: Loss) -> Curve:
    """Train the model with forward, backward, clip, step."""
    n_steps, n_rows = SETTINGS["max_steps"], SETTINGS["per_device_train_batch_size"]
    collate = Pad(model.config.pad_token_id)
    optimizer = torch.optim.AdamW(_decay_groups(model), lr=SETTINGS["learning_rate"])
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, SETTINGS["warmup_steps"], n_steps)
    batches = [range(first, min(first + n_rows, len(rows))) for first in range(0, len(rows), n_rows)]
    curve = Curve()
    model.train()
    for step in range(n_steps):
        value = loss(model, collate([rows[row] for row in batches[step % len(batches)]]))
        value.backward()
        curve.losses.append(value.item())
        curve.grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"]).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curve


def whet_run(model: Any, rows: RowStore, folder: Path, **changes: Any) -> Curve:
    """Train the model with whet."""
    args = engine.TrainingArguments(output_dir=str(folder), **(SETTINGS | {"precision": "fp32"} | changes))
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows)
    assert trainer.objective.packed
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Curve([step["loss"] for step in steps], [step["grad_norm"] for step in steps])


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; biases and norms, which have one dim, do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": SETTINGS["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
