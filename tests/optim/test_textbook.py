"""Every optimizer, step by step, against the formulas of its paper in float64, or against the library it comes from."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from optimizer_runs import DECAY, RATE, Layers, arguments, cases, decays, gradients, take_steps, trained
from torch import Tensor, nn

from whet.config.optimizer_names import names
from whet.optim import registry
from whet.optim.optimizers import muon

N_STEPS = 5
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
Update = Callable[[Tensor, Tensor, dict[str, Any], int, float], Tensor]
"""(parameter, gradient, state, step from 1, decay) -> parameter after the step; all float64."""


def adamw(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2."""
    state["m"] = BETA1 * state.get("m", 0) + (1 - BETA1) * g
    state["v"] = BETA2 * state.get("v", 0) + (1 - BETA2) * g**2
    root = (state["v"] / (1 - BETA2**t)).sqrt() + EPS
    return p - RATE * decay * p - RATE * (state["m"] / (1 - BETA1**t)) / root


def lion(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    m = state.get("m", torch.zeros_like(p))
    state["m"] = BETA2 * m + (1 - BETA2) * g
    return p - RATE * ((BETA1 * m + (1 - BETA1) * g).sign() + decay * p)


def adafactor(*, relative: bool = False, scale: bool = False, beta1: float | None = None) -> Update:
    """Shazeer and Stern 2018, algorithms 4 and 5."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
        keep, square = 1 - t**-0.8, g**2 + 1e-30
        if p.ndim == 2:
            state["r"] = keep * state.get("r", 0) + (1 - keep) * square.sum(1)
            state["c"] = keep * state.get("c", 0) + (1 - keep) * square.sum(0)
            v = torch.outer(state["r"], state["c"]) / state["r"].sum()
        else:
            v = state["v"] = keep * state.get("v", 0) + (1 - keep) * square
        u = g / v.sqrt()
        rate = min(RATE, 1 / math.sqrt(t)) if relative else RATE
        rate *= max(1e-3, float(p.square().mean().sqrt())) if scale else 1.0
        u = rate * u / max(1.0, float(u.square().mean().sqrt()))
        if beta1 is not None:
            u = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * u
        return p - rate * decay * p - u

    return update


def sgd(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
    """Momentum 0.9 (Sutskever et al. 2013), the decay as a part of the gradient."""
    state["m"] = 0.9 * state.get("m", 0) + g + decay * p
    return p - RATE * state["m"]


def rmsprop(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
    """Tieleman and Hinton 2012."""
    g = g + decay * p
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * g**2
    return p - RATE * g / (state["v"].sqrt() + 1e-8)


def adagrad(p: Tensor, g: Tensor, state: dict[str, Any], t: int, decay: float) -> Tensor:
    """Duchi et al. 2011."""
    g = g + decay * p
    state["v"] = state.get("v", 0) + g**2
    return p - RATE * g / (state["v"].sqrt() + 1e-10)


_PAPER = "relative_step=true,scale_parameter=true"
BOOK: dict[str, tuple[str, str | None, Update]] = {
    "adamw_torch": ("adamw_torch", None, adamw),
    "adamw_torch_fused": ("adamw_torch_fused", None, adamw),
    "adamw_hf": ("adamw_hf", None, adamw),
    "adamw_anyprecision": ("adamw_anyprecision", None, adamw),
    "adamw_anyprecision, compensated": ("adamw_anyprecision", "use_kahan_summation=true", adamw),
    "adamw_whet": ("adamw_whet", None, adamw),
    "adafactor": ("adafactor", None, adafactor()),
    "adafactor of the paper": ("adafactor", _PAPER, adafactor(relative=True, scale=True)),
    "adafactor with a first moment": ("adafactor", "beta1=0.9", adafactor(beta1=0.9)),
    "lion_32bit": ("lion_32bit", None, lion),
    "sgd": ("sgd", "momentum=0.9", sgd),
    "rmsprop": ("rmsprop", None, rmsprop),
    "adagrad": ("adagrad", None, adagrad),
}  # fmt: skip


_BY_OTHER_TESTS = {
    "auto": "it stands for adamw_whet or adamw_torch_fused (test_optimizer_names.py)",
    "muon": "it equals torch's, below",
    "nadam": "it follows the paper, in test_nadam.py",
    "adamw_whet_8bit": "it stays near AdamW, below",
}


def test_every_optimizer_is_compared_with_its_rule() -> None:
    """A new one has an entry in BOOK, or a test of its own which is named here; others equal their package's, below."""
    compared = {optim for optim, _, _ in BOOK.values()} | _BY_OTHER_TESTS.keys()
    assert compared == {name for name, row in names().items() if not row.package}


def by_the_book(update: Update) -> list[Tensor]:
    """The parameters after every step, as the formulas have them."""
    model = Layers()
    exact = [parameter.detach().double() for parameter in model.parameters()]
    states: list[dict[str, Any]] = [{} for _ in exact]
    for step in range(N_STEPS):
        given = zip(exact, gradients(list(model.parameters()), step), states, decays(model), strict=True)
        exact = [update(p, g.double(), state, step + 1, decay) for p, g, state, decay in given]
    return exact


@pytest.mark.parametrize("case", BOOK)
def test_optimizer_follows_the_textbook(case: str) -> None:
    optim, optim_args, update = BOOK[case]
    model = trained(optim, N_STEPS, optim_args=optim_args)
    for parameter, exact in zip(model.parameters(), by_the_book(update), strict=True):
        # each step rounds a number below 2 at 2^-24; the move itself is known to a few parts in 2^24 of at most 0.1
        torch.testing.assert_close(parameter.detach().double(), exact, rtol=0, atol=N_STEPS * 5e-7)


@pytest.mark.parametrize("options", [{}, {"beta1": 0.9}, {"clip_threshold": 0.5, "decay_rate": -0.5}])
def test_adafactor_equals_transformers(options: dict[str, float]) -> None:
    theirs, ours = Layers(), trained(
        "adafactor", N_STEPS, optim_args=",".join(f"{key}={value}" for key, value in options.items())
    )  # fmt: skip
    groups = [
        {"params": [parameter], "weight_decay": decay}
        for parameter, decay in zip(theirs.parameters(), decays(theirs), strict=True)
    ]
    usual: dict[str, Any] = {"lr": RATE, "scale_parameter": False, "relative_step": False}
    take_steps(theirs, transformers.Adafactor(groups, **usual, **options), range(N_STEPS))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=N_STEPS * 2e-7)  # rounding in another order


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    theirs, ours = Layers(), trained("muon", N_STEPS)
    chosen = [theirs.wide.weight, theirs.odd.weight]
    rest = [p for p in theirs.parameters() if all(p is not one for one in chosen)]
    kinds = {id(p): decay for p, decay in zip(theirs.parameters(), decays(theirs), strict=True)}
    groups = [{"params": [p], "weight_decay": kinds[id(p)]} for p in rest]
    parts = (
        torch.optim.Muon(chosen, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=RATE),
    )
    for step in range(N_STEPS):
        for part in parts:
            take_steps(theirs, part, [step])
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_muon_leaves_tables_and_heads_to_adamw() -> None:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForQuestionAnswering(config)
    chosen = muon.matrices(model)
    names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    assert {name.split(".")[1] for name in names} == {"encoder"}
    assert len(names) == 6  # query, key, value, attention output, and both of the feed-forward layer


@pytest.mark.parametrize("optim", cases(["adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"]))
def test_optimizer_equals_its_library(optim: str) -> None:
    theirs, ours = Layers(), trained(optim, N_STEPS)
    groups = [
        {"params": [parameter], "weight_decay": decay}
        for parameter, decay in zip(theirs.parameters(), decays(theirs), strict=True)
    ]
    module, kind = {
        "adamw_bnb_8bit": ("bitsandbytes.optim", "AdamW8bit"),
        "adamw_torch_8bit": ("torchao.optim", "AdamW8bit"),
        "adamw_torch_4bit": ("torchao.optim", "AdamW4bit"),
    }[optim]
    optimizer = getattr(importlib.import_module(module), kind)(groups, lr=RATE)
    take_steps(theirs, optimizer, range(N_STEPS))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def _distance_from_adamw(optim: str) -> float:
    """How far it ends from AdamW, as a part of the way that AdamW went."""
    with torch.enable_grad():
        start, exact, ours = Layers(), trained("adamw_torch", 30), trained(optim, 30)
    pairs = list(zip(start.parameters(), exact.parameters(), ours.parameters(), strict=True))
    way = sum(float((b - a).square().sum()) for a, b, _ in pairs)
    return math.sqrt(sum(float((c - b).square().sum()) for _, b, c in pairs) / way)


def test_whets_8bit_adamw_stays_near_adamw() -> None:
    # the gradients here differ by five decades within a block: what is far below the largest is known roughly
    assert _distance_from_adamw("adamw_whet_8bit") < 0.1


@pytest.mark.parametrize("optim", cases(["adamw_bnb_8bit"]))
def test_whets_8bit_adamw_is_as_close_as_bitsandbytes(optim: str) -> None:
    assert _distance_from_adamw("adamw_whet_8bit") <= _distance_from_adamw(optim)


def test_compensation_keeps_what_bf16_would_lose() -> None:
    """Steps of 1e-4 on weights near 1 vanish in bf16 (its spacing there is 2^-8), but not in the compensated sum."""
    settings: dict[str, Any] = {"learning_rate": 1e-4, "weight_decay": 0.0}
    exact = trained("adamw_torch", 40, **settings)

    def error(compensated: str) -> float:
        optim_args = f"use_kahan_summation={compensated}"
        model = trained("adamw_anyprecision", 40, dtype=torch.bfloat16, **settings, optim_args=optim_args)
        ways = zip(model.parameters(), exact.parameters(), Layers().parameters(), strict=True)
        lost = [(p.float() - start.bfloat16().float()) - (e - start) for p, e, start in ways]
        return float(torch.cat([one.detach().flatten() for one in lost]).norm())

    assert error("true") < 0.5 * error("false")


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit"])
def test_bf16_weights_are_the_rounding_of_their_masters(optim: str) -> None:
    model = Layers(torch.bfloat16)
    optimizer = registry.build(model, arguments(optim, learning_rate=1e-4))
    take_steps(model, optimizer, range(N_STEPS))
    for parameter in model.parameters():
        master = optimizer.state[parameter]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(parameter.float(), master)


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit"])
def test_parameter_without_a_gradient_is_not_updated(optim: str) -> None:
    """Its own count of steps goes on where it stopped, as torch's does."""
    models = [Layers(), Layers()]
    optimizers = [
        registry.build(model, arguments(name)) for model, name in zip(models, (optim, "adamw_torch"), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(4):
            for parameter, gradient in zip(model.parameters(), gradients(list(model.parameters()), step), strict=True):
                parameter.grad = gradient
            if step % 2:
                model.odd.weight.grad = None
            optimizer.step()
    assert optimizers[0].state[models[0].odd.weight]["step"] == 2
    assert optimizers[0].state[models[0].wide.weight]["step"] == 4
    atol = 2e-6 if optim == "adamw_whet" else 0.3 * 4 * RATE
    torch.testing.assert_close(models[0].odd.weight, models[1].odd.weight, rtol=0, atol=atol)


@pytest.mark.parametrize("optim", ["adamw_whet", "adamw_whet_8bit"])
def test_transposed_weight_is_updated(optim: str) -> None:
    plain, turned = Layers(), Layers()
    turned.wide.weight = nn.Parameter(turned.wide.weight.detach().T.contiguous().T)
    assert not turned.wide.weight.is_contiguous()
    for model in (plain, turned):
        take_steps(model, registry.build(model, arguments(optim)), range(N_STEPS))
    assert torch.equal(plain.wide.weight, turned.wide.weight)
