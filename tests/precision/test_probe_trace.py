"""The passes that are timed before training leave nothing behind: no gradient, no random number, no statistics."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timed_runs import Mixed, clock_of, trainer_of
from torch import Tensor, nn
from transformers import TrainerCallback

import engine
from tiny import arguments
from whet.kernels.embedding import RowGradient
from whet.models.fused.layers import GRADIENT


def _generators() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist(), torch.initial_seed()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert [name for name, value in model.state_dict().items() if not value.equal(before[name])] == []


def _mixed_trainer(folder: Path) -> engine.Trainer:
    numbers = torch.Generator().manual_seed(2)
    rows = [{"x": x, "labels": x.sum()} for x in torch.randn(12, 4, generator=numbers)]
    trainer = engine.Trainer(model=Mixed(), args=arguments(folder), train_dataset=rows)
    trainer.precision.clock = clock_of(1.0, 1.0)
    return trainer


@pytest.mark.each_value
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("other", ["bf16", "fp16"])
def test_probe_leaves_no_trace_in_a_packed_model(tmp_path: Path, other: str) -> None:
    trainer = trainer_of(tmp_path, clock_of(1.0, 1.0))
    model, kept = trainer.model.eval(), torch.ones(2)
    table = model.bert.embeddings.word_embeddings
    model.qa_outputs.bias.grad = kept
    before, generators = _state(model), _generators()
    row_gradient = getattr(table, GRADIENT, None)
    assert trainer.precision.time_steps(trainer.prepared, np.arange(24), other) is not None
    _assert_untouched(model, before)
    assert _generators() == generators
    assert not any(module.training for module in model.modules())
    assert model.qa_outputs.bias.grad is kept
    assert kept.eq(1).all()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["qa_outputs.bias"]
    assert getattr(table, GRADIENT, None) is row_gradient
    if isinstance(row_gradient, RowGradient):
        assert not row_gradient.buffer.any()


def test_probe_leaves_no_trace_in_any_module(tmp_path: Path) -> None:
    """Batch statistics, modes of single parts and the generators are those from before; hooks have not run."""
    trainer = _mixed_trainer(tmp_path)
    model, called = trainer.model, []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(called.append)
            parameter.register_post_accumulate_grad_hook(called.append)
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)
    torch.rand(3)
    before, generators, modes = _state(model), _generators(), [module.training for module in model.modules()]
    assert trainer.precision.time_steps(trainer.prepared, np.arange(12), "bf16") is not None
    _assert_untouched(model, before)
    assert _generators() == generators
    assert [module.training for module in model.modules()] == modes
    assert called == []
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_probe_leaves_no_trace_with_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    class Again(Mixed):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = torch.utils.checkpoint.checkpoint(
                lambda one: self.norm(self.first(one)), x.requires_grad_(), use_reentrant=reentrant
            )
            return {"loss": ((self.head(self.frozen(hidden)).squeeze(-1) - labels) ** 2).mean()}

    trainer = _mixed_trainer(tmp_path)
    trainer = engine.Trainer(model=Again(), args=trainer.args, train_dataset=trainer.train_dataset)
    before = _state(trainer.model)
    assert trainer.precision.time_steps(trainer.prepared, np.arange(12), "bf16") is not None
    _assert_untouched(trainer.model, before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_probe_is_invisible_to_callbacks(tmp_path: Path) -> None:
    class Counts(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.events.append("step")

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.events.append("update")

    seen = Counts()
    trainer_of(tmp_path, clock_of(1.0, 1.0), callbacks=[seen]).train()
    assert seen.events == ["step", "update"] * 3
