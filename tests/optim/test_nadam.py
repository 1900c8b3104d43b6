"""NAdam of the registry: torch's curve, the paper's formulas, and a resume in bf16."""

from __future__ import annotations

from copy import deepcopy
from math import prod
from typing import Any

import pytest
import torch
from optimizer_runs import DECAY, RATE, Layers, arguments, decays, gradients, take_steps
from torch import Tensor, nn

from whet.optim import registry

_STEPS = 30
_BETA1, _BETA2, _EPS, _PSI = 0.9, 0.999, 1e-8, 4e-3


def _curve(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor) -> list[float]:
    losses = []
    for _ in range(_STEPS):
        loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("optim_args", [None, "momentum_decay=0.01,decoupled_weight_decay=true"])
def test_nadam_has_the_curve_of_torchs(optim_args: str | None) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    theirs, x = deepcopy(ours), torch.randn(64, 8)
    weights, biases = ([p for p in theirs.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": weights, "weight_decay": DECAY}, {"params": biases, "weight_decay": 0.0}]
    options: dict[str, Any] = {} if optim_args is None else {"momentum_decay": 0.01, "decoupled_weight_decay": True}
    wanted = _curve(torch.optim.NAdam(groups, lr=RATE, **options), theirs, x)
    assert _curve(registry.build(ours, arguments("nadam", optim_args=optim_args)), ours, x) == wanted
    assert wanted[-1] < 0.6 * wanted[0]


def test_nadam_follows_the_paper() -> None:
    """Dozat 2016, algorithm 2 with the factors of its section on warming up; weight decay is added to the gradient."""
    model = Layers()
    exact = [parameter.detach().double() for parameter in model.parameters()]
    means, squares = ([torch.zeros_like(one) for one in exact] for _ in range(2))
    mu = [_BETA1 * (1 - 0.5 * 0.96 ** (t * _PSI)) for t in range(1, _STEPS + 2)]
    for t in range(1, _STEPS + 1):
        for p, given, mean, square, decay in zip(
            exact, gradients(list(model.parameters()), t - 1), means, squares, decays(model), strict=True
        ):
            grad = given.double() + decay * p
            mean.mul_(_BETA1).add_(grad, alpha=1 - _BETA1)
            square.mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
            ahead = mu[t] * mean / (1 - prod(mu[: t + 1])) + (1 - mu[t - 1]) * grad / (1 - prod(mu[:t]))
            p.sub_(RATE * ahead / ((square / (1 - _BETA2**t)).sqrt() + _EPS))
    ours = Layers()
    take_steps(ours, registry.build(ours, arguments("nadam")), range(_STEPS))
    for parameter, wanted in zip(ours.parameters(), exact, strict=True):
        # each step rounds a number below 2 at 2^-24, and a move of at most 0.1 to a few parts in 2^24
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=0, atol=_STEPS * 5e-7)


def test_resumed_nadam_in_bf16_keeps_its_product_of_factors() -> None:
    """torch's own load_state_dict rounds it to the dtype of the weight."""
    whole, stopped = Layers(torch.bfloat16), Layers(torch.bfloat16)
    take_steps(whole, registry.build(whole, arguments("nadam")), range(6))
    first = registry.build(stopped, arguments("nadam"))
    take_steps(stopped, first, range(3))
    second = registry.build(stopped, arguments("nadam"))
    second.load_state_dict(first.state_dict())
    products = {values["mu_product"].dtype for values in second.state.values()}
    take_steps(stopped, second, range(3, 6))
    assert products == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), stopped.parameters(), strict=True))
