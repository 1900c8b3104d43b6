"""A linear layer and its low-rank pair in one product: the sum of the two, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from native_support import need_native
from torch import Tensor
from torch.nn import functional

from whet.kernels.linear import LowRank, low_rank_linear

need_native()

ROWS, WIDTH, OUT, RANK = 300, 96, 130, 8
NAMES = ("x", "dropped", "weight", "bias", "down", "up")


def plain(x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, pair: LowRank) -> Tensor:
    """Compute the same as `low_rank_linear` step by step: the reference."""
    low = functional.linear(functional.linear(x if dropped is None else dropped, pair.down), pair.up)
    return functional.linear(x, weight, bias) + low * pair.scale


def _given(dropped: bool, bias: bool, frozen: bool) -> dict[str, Tensor | None]:
    """Return leaves of small numbers, some of which learn."""
    torch.manual_seed(5)
    x = torch.randn(1, ROWS, WIDTH)
    sizes = {"weight": (OUT, WIDTH), "bias": (OUT,), "down": (RANK, WIDTH), "up": (OUT, RANK)}
    found: dict[str, Tensor | None] = {"x": x, "dropped": x * (torch.rand(x.shape) < 0.7) if dropped else None}
    found |= {name: torch.randn(size) / 8 for name, size in sizes.items()}
    if not bias:
        found["bias"] = None
    for name, one in found.items():
        if one is not None:
            one.requires_grad_(name in ("x", "dropped", "down", "up") or not frozen)
    return found


def _run(way: object, given: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the result and the gradients of what learns."""
    leaves = {name: None if one is None else one.detach().to(dtype).requires_grad_(one.requires_grad)
              for name, one in given.items()}  # fmt: skip
    x, dropped, weight, bias, down, up = (leaves[name] for name in NAMES)
    result = way(x, dropped, weight, bias, LowRank(down, up, 1.7))  # type: ignore[operator]
    weights = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view(result.shape)
    (result.double() * weights).sum().backward()
    gradients = {name: one.grad for name, one in leaves.items() if one is not None and one.grad is not None}
    return {"result": result.detach(), **gradients}


@pytest.mark.parametrize(("dropped", "bias", "frozen"), list(product([False, True], repeat=3)))
def test_one_product_is_the_sum_of_two(dropped: bool, bias: bool, frozen: bool) -> None:
    given = _given(dropped, bias, frozen)
    found, exact = _run(low_rank_linear, given, torch.float32), _run(plain, given, torch.float64)
    assert found.keys() == exact.keys()
    assert frozen or "weight" in found
    for name, one in exact.items():
        error = float((found[name].double() - one).norm() / one.norm())
        assert error < 2e-6, name  # sums of at most 300 products in fp32


@pytest.mark.parametrize("dropped", [False, True])
def test_autocast_computes_in_its_format(dropped: bool) -> None:
    given = _given(dropped, bias=True, frozen=True)

    def cast(*args: object) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return low_rank_linear(*args)  # type: ignore[arg-type]

    found, exact = _run(cast, given, torch.float32), _run(plain, given, torch.float64)
    assert found["result"].dtype == torch.bfloat16
    assert {one.dtype for name, one in found.items() if name != "result"} == {torch.float32}
    for name, one in exact.items():
        error = float((found[name].double() - one).norm() / one.norm())
        assert 1e-4 < error < 1e-2, name  # 2^-9 for each of the numbers that are rounded
