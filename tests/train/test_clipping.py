"""Clipping, in a pass of its own or in the optimizer's: the same step, and callbacks see the clipped gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainerCallback

import engine
from tiny import arguments, losses, tiny_model, tiny_rows
from whet.engine.update import ClipInOwnPass
from whet.models import lazy_tensor

BOUND = 0.5


class Looks(TrainerCallback):
    """Notes the norm of the gradient around the optimizer's step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def look(self, model: nn.Module) -> None:
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in found)))


class Before(Looks):
    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.look(model)


class After(Looks):
    def on_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.look(model)


class Hook(Looks):
    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.look(model))


class Everywhere(Looks):
    """A hook on all optimizers of the process."""

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.handle = register_optimizer_step_pre_hook(lambda *_: self.look(model))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.handle.remove()


def _run(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> engine.Trainer:
    args = arguments(folder, max_steps=8, learning_rate=1e-2, max_grad_norm=BOUND, **changes)
    model = tiny_model("bert", dropout=0.1)
    trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(32, "bert"), callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [Before, After, Hook, Everywhere])
@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit", "adamw_torch_fused"])
def test_who_looks_sees_the_clipped_gradient_and_changes_nothing(tmp_path: Path, optim: str, kind: type[Looks]) -> None:
    looks = kind()
    seen, unseen = _run(tmp_path / "seen", looks, optim=optim), _run(tmp_path / "unseen", optim=optim)
    assert len(looks.norms) == 8
    assert max(looks.norms) < BOUND * (1 + 1e-5)
    whole = [entry["grad_norm"] for entry in seen.state.log_history if "grad_norm" in entry]
    assert min(whole) > BOUND  # what is logged is the norm before
    for one, other in zip(seen.model.parameters(), unseen.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # a product more is rounded, eight steps long
    assert losses(seen) == pytest.approx(losses(unseen), rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_torch_fused"])
def test_the_bound_counts(tmp_path: Path, optim: str) -> None:
    clipped = losses(_run(tmp_path / "clipped", optim=optim))
    args = arguments(tmp_path / "free", max_steps=8, learning_rate=1e-2, max_grad_norm=0.0, optim=optim)
    free = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(32, "bert"))
    free.train()
    assert losses(free)[-1] != pytest.approx(clipped[-1], rel=1e-4)


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit"])
def test_nothing_of_whets_own_makes_clipping_a_pass_of_its_own(
    tmp_path: Path, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a pass reads and writes every gradient: a tenth of a step of few tokens. The first step may have one."""
    passes: list[float] = []
    monkeypatch.setattr(ClipInOwnPass, "prepare", lambda _, grad_scale: passes.append(grad_scale))
    monkeypatch.setattr(lazy_tensor, "_HOOKS", [])
    lazy_tensor.Origin([torch.ones(1)])
    try:
        _run(tmp_path, optim=optim)
    finally:
        for hook in lazy_tensor._HOOKS:
            hook.remove()
    assert len(passes) <= 1
