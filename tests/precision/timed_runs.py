"""Runs large enough to be measured, and clocks that decide what the measurement says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from tiny import arguments, tiny_model, tiny_rows


def clock_of(fp32_s: float, other_s: float) -> Callable[[], float]:
    """Return a clock by which passes in fp32 and in the other format, in turns, take these times."""
    now_s, takes_s, running = 0.0, cycle((fp32_s, other_s)), False

    def clock() -> float:
        nonlocal now_s, running
        now_s += next(takes_s) if running else 0.0
        running = not running
        return now_s

    return clock


def no_clock() -> float:
    """Stand in for the clock where nothing may be measured."""
    raise AssertionError("something was measured")


def measurable_model(**changes: Any) -> Any:
    """Return a BERT whose 512 tokens are 1.6 GFLOP of products: more than what is not worth a measurement."""
    return tiny_model("bert", dropout=0.1, hidden_size=128, num_hidden_layers=4, intermediate_size=256, **changes)


def trainer_of(folder: Path, clock: Callable[[], float] | None = None, **changes: Any) -> engine.Trainer:
    """Return a trainer of three steps on such a model; `clock` times what it measures."""
    own = {name: changes.pop(name) for name in ("model", "callbacks") if name in changes}
    trainer = engine.Trainer(
        **({"model": measurable_model()} | own),
        args=arguments(folder, **({"max_steps": 3} | changes)),
        train_dataset=tiny_rows(24, lengths=(20, 40)),
    )
    trainer.precision.clock = clock or trainer.precision.clock
    return trainer


class Mixed(nn.Module):
    """Has what a probe could disturb: batch statistics, dropout from torch's generator, a frozen part, own modes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 600)
        self.norm = nn.BatchNorm1d(600)
        self.dropout = nn.Dropout(0.2)
        self.frozen = nn.Linear(600, 600)
        self.frozen.requires_grad_(False)
        self.frozen.eval()
        self.head = nn.Linear(600, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(self.norm(self.first(x)))
        return {"loss": ((self.head(self.frozen(hidden)).squeeze(-1) - labels) ** 2).mean()}
