"""Frozen lower layers: they keep their values and drop nothing; what lies above them trains as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine
import whet
from tiny import FAMILIES_WITH_OWN_CODE, arguments, tiny_model, tiny_rows, weights_of
from tiny_decoders import DECODERS, tiny_decoder
from whet.config.methods import MethodSettings
from whet.methods import freeze_layers, order
from whet.models.view import ModelView


def trained(folder: Path, n_frozen: int | None, **changes: Any) -> engine.Trainer:
    args = arguments(folder, **({"max_steps": 2, "optim": "adamw_torch", "freeze_layers": n_frozen} | changes))
    trainer = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(12))
    trainer.train()
    return trainer


def moments_bytes(trainer: Any) -> int:
    states = trainer.optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if value.dim() > 0)


@pytest.mark.parametrize("n_frozen", [0, 1, 2])
def test_lower_layers_alone_keep_their_values(n_frozen: int, tmp_path: Path) -> None:
    before, after = weights_of(tiny_model("bert")), weights_of(trained(tmp_path, n_frozen).model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    lower = ("bert.embeddings.", *(f"bert.encoder.layer.{n}." for n in range(n_frozen)))
    assert same == {name for name in before if name.startswith(lower)}


def test_lower_layers_drop_nothing_and_upper_ones_do(tmp_path: Path) -> None:
    model = trained(tmp_path, 1).model.train()
    drops = {name: one.training for name, one in model.named_modules() if isinstance(one, torch.nn.Dropout)}
    lower = ("bert.embeddings.", "bert.encoder.layer.0.")
    assert {name for name, on in drops.items() if not on} == {name for name in drops if name.startswith(lower)}
    assert any(drops.values())
    order.restore(model)
    assert all(module.training for module in model.modules())
    assert all(weight.requires_grad for weight in model.parameters())


def test_it_saves_the_moments_that_it_says(tmp_path: Path) -> None:
    said = freeze_layers.cost(ModelView(tiny_model("bert")), MethodSettings(freeze_layers=1))
    plain, frozen = (trained(tmp_path / str(n), n) for n in (None, 1))
    assert moments_bytes(frozen) - moments_bytes(plain) == said.optimizer_bytes < 0
    assert said.gradient_bytes == said.optimizer_bytes // 2  # one float32 number instead of two


@pytest.mark.parametrize("family", sorted({*FAMILIES_WITH_OWN_CODE, *DECODERS}))
def test_every_family_has_its_lower_part(family: str) -> None:
    """No gradient reaches the first block, and every dropout of the embeddings and of it is off."""
    model = tiny_decoder(family, dropout=0.1) if family in DECODERS else tiny_model(family, dropout=0.1)
    view = ModelView(model.train())
    if not view.depths():
        with pytest.raises(whet.ConfigError, match="freeze_layers 1 does not fit"):
            freeze_layers.apply(view, MethodSettings(freeze_layers=1))
        return
    freeze_layers.apply(view, MethodSettings(freeze_layers=1))
    first, second = (block for _, block in view.blocks())
    assert not any(weight.requires_grad for weight in first.parameters())
    assert all(weight.requires_grad for weight in second.parameters())
    assert not any(module.training for module in model.train().modules() if module in set(first.modules()))
    assert not any(table.training for _, table in view.tables() if not any(table is one for one in second.modules()))
    assert all(module.training for module in second.modules())


def test_more_blocks_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="2 blocks"):
        trained(tmp_path, 3)
