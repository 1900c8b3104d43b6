"""What the tests of the optimizers share: a small model, gradients that are the same each time, and steps with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engine
from whet.config.optimizer_names import names
from whet.optim import registry

PACKAGES = {name: row.package for name, row in names().items() if row.package}
"""Optimizers that need a package which the project does not bring."""
RATE, DECAY = 1e-2, 0.1


class Layers(nn.Module):
    """A table, matrices (one too large for a block of anybody), biases and a norm; a weight of odd size."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.wide = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(37)
        self.odd = nn.Linear(37, 3)
        self.to(dtype)


def arguments(optim: str, **changes: Any) -> engine.TrainingArguments:
    """Settings with this optimizer."""
    return engine.TrainingArguments(**({"optim": optim, "learning_rate": RATE, "weight_decay": DECAY} | changes))


def cases(chosen: Iterable[str] = names()) -> list[Any]:
    """Parameters of a test, one an optimizer; those whose package is missing are skipped by name."""
    return [pytest.param(name, marks=_marks(name)) for name in chosen]


def _marks(name: str) -> list[Any]:
    package = PACKAGES.get(name)
    if package is None:
        return []
    missing = importlib.util.find_spec(package) is None
    return [
        pytest.mark.skipif(missing, reason=f"needs the package {package}"),
        pytest.mark.filterwarnings("ignore"),  # what other packages warn of when they are imported
    ]


def gradients(parameters: Sequence[Tensor], step: int) -> list[Tensor]:
    """Gradients of very different sizes, a function of the step."""
    numbers = torch.Generator().manual_seed(100 + step)
    return [
        (torch.randn(p.shape, generator=numbers) * 10.0 ** torch.randint(-4, 1, p.shape, generator=numbers)).to(p.dtype)
        for p in parameters
    ]


def take_steps(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Take these steps with the gradients that belong to them."""
    parameters = list(model.parameters())
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes minutes and changes nothing
        for step in steps:
            for parameter, gradient in zip(parameters, gradients(parameters, step), strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()


def trained(optim: str, n_steps: int, *, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """`Layers` after some steps of this optimizer."""
    model = Layers(dtype)
    take_steps(model, registry.build(model, arguments(optim, **changes)), range(n_steps))
    return model


def decays(model: nn.Module) -> list[float]:
    """The weight decay of each parameter, in their order: weights decay, biases and norms do not."""
    spared = ("bias", "norm.weight")
    return [0.0 if name.endswith(spared) else DECAY for name, _ in model.named_parameters()]
