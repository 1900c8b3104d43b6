"""Frozen embedding tables: the same values after training, and the bytes that the method says it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
import whet
from tiny import arguments, tiny_model, tiny_rows, weights_of
from whet.config.methods import MethodSettings
from whet.methods import freeze_tables
from whet.models.view import ModelView


def trained(folder: Path, **changes: Any) -> engine.Trainer:
    args = arguments(folder, max_steps=2, optim="adamw_torch", **changes)
    trainer = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(12))
    trainer.train()
    return trainer


def moments_bytes(trainer: Any) -> int:
    states = trainer.optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if value.dim() > 0)


def test_only_the_tables_keep_their_values(tmp_path: Path) -> None:
    before, trainer = weights_of(tiny_model("bert")), trained(tmp_path, methods=["freeze_tables"])
    after = weights_of(trainer.model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "_embeddings" in name}


def test_it_saves_the_moments_that_it_says(tmp_path: Path) -> None:
    said = freeze_tables.cost(ModelView(tiny_model("bert")), MethodSettings(names=("freeze_tables",)))
    plain, frozen = (trained(tmp_path / str(names), methods=names) for names in ([], ["freeze_tables"]))
    assert moments_bytes(frozen) - moments_bytes(plain) == said.optimizer_bytes < 0
    assert said.gradient_bytes == said.optimizer_bytes // 2  # one float32 number instead of two


def test_a_model_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="finds no embedding table"):
        engine.Trainer(model=nn.Linear(2, 2), args=arguments(tmp_path, methods=["freeze_tables"]))
