"""What the tests of the native operators share: positions, comparison with float64, runs on 1 and 2 threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from whet.kernels.batch_position import BatchPosition
from whet.kernels.library import library

quick = settings(max_examples=10, deadline=None, derandomize=True)

# Relative norm of the error against float64. fp32: a few sums of hundreds of terms, each rounded at 2^-24.
# bf16: what is stored is rounded at 2^-9 relative; some results are rounded twice.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def need_native() -> None:
    """Skip the test file where the library is not built."""
    if library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)", allow_module_level=True)


def position_of(lengths: Sequence[int], *, seed: int = 3, step: int = 5, first_slot: int = 7) -> BatchPosition:
    """Return the position of rows of these lengths, in slots from `first_slot` on."""
    lengths_of = torch.tensor(lengths)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of.cumsum(0)]).int()
    slots = torch.arange(first_slot, first_slot + len(lengths), dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    return BatchPosition(seed, step, slots.repeat_interleave(lengths_of), positions, starts, slots)


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error in units of the exact tensor's norm.

    Terms are of order one; where they cancel (the softmax of one key has no gradient), the error is one of the terms.
    """
    return float((found.double() - exact).norm() / exact.norm().clamp_min(0.05 * exact.numel() ** 0.5))


def outputs_and_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the inputs' gradients under one fixed output gradient."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    wave = torch.sin(1.0 + torch.arange(out.numel()) * 0.7).view(out.shape).bfloat16()  # the same number in every dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, wave.to(out.dtype))]


def layer_inputs(dtype: torch.dtype, n_rows: int, width: int, out: int) -> list[Tensor]:
    """Return leaves for a linear layer: x (1, n_rows, width) of this dtype, weight (out, width) and bias (out,)."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, n_rows, width).to(dtype), torch.randn(out, width), torch.randn(out)
    return [one.requires_grad_() for one in (x, weight, bias)]


def result_and_gradients(way: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the result with its graph, and the leaves' gradients, computed without autocast."""
    y = way(*given)
    wave = torch.sin(torch.arange(y.numel()).float()).view(y.shape).to(y.dtype)
    with torch.autocast("cpu", enabled=False):
        return y, list(torch.autograd.grad(y, given, wave))


def assert_near_float64(
    native: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: Sequence[Tensor], n_roundings: int = 2
) -> None:
    """Compare output and gradients with the textbook version in float64, at the tolerance of the first dtype.

    The tolerance is that of two roundings by half a unit in the last place; gradients may have `n_roundings`.
    """
    found = outputs_and_gradients(native, inputs)
    exact = outputs_and_gradients(twin, [tensor.double() for tensor in inputs])
    for number, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
        roundings = n_roundings if number else 2
        assert relative(ours, theirs) < TOLERANCE[inputs[0].dtype] * roundings / 2, f"output or gradient {number}"


def assert_same_on_two_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    """Run on one thread and on two; every bit must be the same."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
