"""AdamW with 8-bit moments: the map of the paper, the native operator against its twin, any size, any thread count."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_same_on_two_threads, need_native, quick
from torch import Tensor

from whet.kernels.adamw import BLOCK, AdamW8bitTensors, AdamWStep, Codes, adamw_8bit_reference, dynamic_map

need_native()
SIZES = st.lists(st.integers(1, 70_000), min_size=1, max_size=4)
RATES = (1e-2, 0.1)


def numbers(sizes: list[int], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random numbers of sizes over seven decades."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 1, (n,), generator=generator)).to(dtype)
        for n in sizes
    ]


def moments(sizes: list[int], *, signed: bool) -> list[Codes]:
    """Codes of zeros."""
    return [Codes(torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // BLOCK)), signed) for n in sizes]


def copied(codes: list[Codes]) -> list[Codes]:
    return [Codes(one.codes.clone(), one.scales.clone(), one.signed) for one in codes]


def encoded(values: Tensor, *, signed: bool) -> Codes:
    """The moments after a native step that takes nothing of the old ones and all of the gradient."""
    param, first, second = torch.zeros_like(values), *(moments([values.numel()], signed=s) for s in (True, False))
    step = AdamWStep(0.0, 0.0, 1.0, 1)
    gradient = values if signed else values.sqrt()
    AdamW8bitTensors([param], first, second).update([gradient], [(0.0, 0.0)], step)
    return first[0] if signed else second[0]


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_equals_the_papers(signed: bool) -> None:
    """Each decade has twice the values of the one below; the ends are exact; nothing is there twice."""
    values = dynamic_map(signed)
    assert values.unique().numel() == 256
    assert {0.0, 1.0} < set(values.tolist())
    found = [int(((values.abs() > 10.0**i) & (values.abs() < 10.0 ** (i + 1))).sum()) for i in range(-7, 0)]
    assert found == [2 * 2**i for i in range(7)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_equals_bitsandbytes(signed: bool) -> None:
    import bitsandbytes.functional as theirs

    wanted = theirs.create_dynamic_map(signed=signed).double()
    torch.testing.assert_close(dynamic_map(signed).sort().values, wanted, rtol=1e-6, atol=0)  # theirs are fp32


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_its_own_nearest(signed: bool) -> None:
    """A block that holds every value of the map comes back as the codes 0 to 255."""
    values = dynamic_map(signed).float()
    found = encoded(values, signed=signed)
    assert float(found.scales) == pytest.approx(1.0)
    assert found.codes.tolist() == list(range(256))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    """Over every binary order of magnitude: no other code would be nearer, but for rounding of the share itself."""
    shares = 2.0 ** torch.linspace(-30, 0, 40_000)
    shares = torch.cat([shares, -shares]) if signed else shares
    shares = torch.cat([shares, torch.zeros(1)])
    padded = torch.cat([shares.view(-1, 1), torch.ones(shares.numel(), 1)], 1)  # each beside the 1 that sets its scale
    blocks = torch.nn.functional.pad(padded, (0, BLOCK - 2))
    found = encoded(blocks.flatten(), signed=signed).numbers().view(-1, BLOCK)[:, 0].double()
    table = dynamic_map(signed).sort().values
    if not signed:
        table = table[1:]  # a positive second moment never becomes zero
    nearest = (shares.double().view(-1, 1) - table).abs().min(1).values
    error = (found - shares.double()).abs()
    positive = shares != 0
    assert bool((error[positive] <= nearest[positive] + 1e-6 * shares.abs()[positive] + 1e-12).all())
    assert float(error[~positive]) == 0.0


@quick
@given(sizes=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]), masters=st.booleans())
def test_step_equals_the_reference(sizes: list[int], dtype: torch.dtype, masters: bool) -> None:
    params = numbers(sizes, 1, dtype)
    first, second = moments(sizes, signed=True), moments(sizes, signed=False)
    for codes in (*first, *second):
        codes.put(
            numbers([codes.codes.numel()], 2)[0].abs() if not codes.signed else numbers([codes.codes.numel()], 3)[0]
        )
    kept = [param.float() for param in params] if masters else None
    exact = [param.double() for param in params]
    twins = (copied(first), copied(second))
    grads = numbers(sizes, 4, dtype)
    step = AdamWStep(0.9, 0.999, 1e-8, 3, grad_scale=0.5)
    AdamW8bitTensors(params, first, second, kept).update(grads, [RATES] * len(sizes), step)
    state = list(zip(exact, [grad.double() for grad in grads], *twins, strict=True))
    adamw_8bit_reference(state, [RATES] * len(sizes), step)
    for ours, theirs in zip((first, second), twins, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.scales, other.scales, rtol=1e-6, atol=0)
            differ = one.codes != other.codes  # only where the share lies on the border between two codes, to rounding
            assert int(differ.sum()) <= 1 + one.codes.numel() // 10_000
    for i, truth in enumerate(exact):
        if masters or dtype == torch.float32:
            found = kept[i] if kept is not None else params[i]
            # one rounding of a number below 8; the way itself is exact to a few parts in 2^24 of at most 1
            assert float((found - truth).abs().max()) < 2e-6
        if masters:
            assert kept is not None
            assert torch.equal(params[i], kept[i].to(dtype))


def test_incomplete_blocks_are_quantised() -> None:
    """No size falls back to 32 bits; what lies behind a tensor's end is not touched."""
    for n in (1, 7, 255, 256, 257, 4095):
        room = torch.zeros(n + 64, dtype=torch.uint8) + 77
        first = Codes(room[:n], torch.zeros(math.ceil(n / BLOCK)), signed=True)
        second = moments([n], signed=False)[0]
        first.codes.zero_()
        param, grad = numbers([n], 1)[0], numbers([n], 2)[0]
        AdamW8bitTensors([param], [first], [second]).update([grad], [RATES], AdamWStep(0.9, 0.999, 1e-8, 1))
        assert room[n:].eq(77).all()
        assert first.codes.any()
        torch.testing.assert_close(first.numbers(), 0.1 * grad, rtol=0.5, atol=float(grad.abs().max()) * 1e-6)


def test_positive_second_moment_never_becomes_zero() -> None:
    gradient = torch.cat([torch.ones(1), torch.full((BLOCK - 1,), 1e-9)])
    param, first, second = torch.zeros(BLOCK), moments([BLOCK], signed=True), moments([BLOCK], signed=False)
    AdamW8bitTensors([param], first, second).update([gradient], [RATES], AdamWStep(0.9, 0.999, 1e-8, 1))
    assert (second[0].codes > 0).all()


def test_zero_gradients_leave_zero_moments() -> None:
    param, first, second = torch.ones(300), moments([300], signed=True), moments([300], signed=False)
    AdamW8bitTensors([param], first, second).update([torch.zeros(300)], [(1e-2, 0.0)], AdamWStep(0.9, 0.999, 1e-8, 1))
    assert torch.equal(param, torch.ones(300))
    assert not any(one.codes.any() or one.scales.any() for one in (*first, *second))


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e18])
def test_very_small_and_large_gradients_are_harmless(size: float) -> None:
    param, first, second = torch.ones(300), moments([300], signed=True), moments([300], signed=False)
    for step in range(1, 4):
        gradient = numbers([300], step)[0] * size
        AdamW8bitTensors([param], first, second).update([gradient], [(1e-2, 0.0)], AdamWStep(0.9, 0.999, 1e-8, step))
    assert float((param - 1).abs().max()) < 0.1  # about the rate a step, as AdamW's


def test_nan_is_not_hidden_by_quantising() -> None:
    param, first, second = torch.ones(300), moments([300], signed=True), moments([300], signed=False)
    gradient = torch.ones(300)
    gradient[270] = torch.nan
    AdamW8bitTensors([param], first, second).update([gradient], [RATES], AdamWStep(0.9, 0.999, 1e-8, 1))
    assert param.isnan().nonzero().tolist() == [[270]]


def test_8bit_optimizer_does_not_depend_on_threads() -> None:
    sizes = [70_000, 33_000, 5]

    def run() -> list[Tensor]:
        params = numbers(sizes, 1)
        first, second = moments(sizes, signed=True), moments(sizes, signed=False)
        tensors = AdamW8bitTensors(params, first, second)
        for step in range(1, 4):
            tensors.update(numbers(sizes, step), [RATES] * 3, AdamWStep(0.9, 0.999, 1e-8, step))
        return [*params, *(one.codes for one in (*first, *second)), *(one.scales for one in (*first, *second))]

    assert_same_on_two_threads(run)
