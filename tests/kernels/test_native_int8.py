"""Products in 8 bits: against the textbook version in float64, and within what their scales promise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_same_on_two_threads, need_native, quick, relative
from torch import Tensor

from whet.kernels import int8 as product_int8
from whet.kernels.int8 import MOST, dither, pack, product, product_reference

need_native()

ROUNDING = 2e-6
"""Sums within a block are exact; scales, and the sum over blocks, are rounded at 2^-24 each."""
SHAPES = {"rows": st.integers(1, 40), "depth": st.integers(1, 600), "columns": st.integers(1, 100)}
BLOCKS = st.sampled_from([64, 128, 256, 1 << 20])
KEYS = st.sampled_from([None, (1, 2), (0xFFFFFFFF, 7)])


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers of normal distribution, each row in a size of its own."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)


def _bound(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """Return how far the product may be off: half a step of one factor times the other, and of both."""
    found = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for first in range(0, x.shape[1], block):
        a, b = (side[:, first : first + block].double().abs() for side in (x, weight))
        half_a, half_b = (side.amax(1) / MOST / 2 for side in (a, b))
        both = a.shape[1] * half_a[:, None] * half_b
        found += half_a[:, None] * b.sum(1) + a.sum(1)[:, None] * half_b + both
    return found


@quick
@given(**SHAPES, block=BLOCKS, with_bias=st.booleans(), key=KEYS)
def test_product_is_the_textbook_one(
    rows: int, depth: int, columns: int, block: int, with_bias: bool, key: tuple[int, int] | None
) -> None:
    x, weight = _numbers(rows, depth), _numbers(columns, depth, seed=1)
    bias = torch.randn(columns) if with_bias else None
    found = product(x, pack(weight, down=False, block=block), bias, key)
    exact = product_reference(x, weight, bias, block, key)
    # In one of 10^5 cases dither brings a number so near to a tie that it rounds the other way: one step of 127.
    assert relative(found, exact) < (ROUNDING if key is None else 1e-3)


@quick
@given(**SHAPES, block=BLOCKS)
def test_error_is_within_what_the_scales_imply(rows: int, depth: int, columns: int, block: int) -> None:
    x, weight = _numbers(rows, depth), _numbers(columns, depth, seed=1)
    gap = (product(x, pack(weight, down=False, block=block)).double() - x.double() @ weight.double().t()).abs()
    assert bool((gap <= _bound(x, weight, block) * (1 + 1e-5) + 1e-6).all())


@quick
@given(**SHAPES, block=BLOCKS)
def test_weight_packs_equally_from_both_layouts(rows: int, depth: int, columns: int, block: int) -> None:
    x, weight = _numbers(rows, depth), _numbers(columns, depth, seed=1)
    across = product(x, pack(weight, down=False, block=block))
    down = product(x, pack(weight.t().contiguous(), down=True, block=block))
    assert torch.equal(across, down)


def test_stochastic_rounding_is_exact_on_average() -> None:
    """One rounding is off by up to a step; the mean of 400 by about its 20th part."""
    x, eye = _numbers(8, 300), torch.eye(300)
    steps = x.abs().amax(1, keepdim=True) / MOST
    packed = pack(eye, down=False, block=1 << 20)
    drawn = torch.stack([product(x, packed, key=(number, 9)) for number in range(400)])
    assert float(((drawn - x).abs() / steps).max()) < 1.001
    assert float((drawn[0] - drawn[1]).abs().max()) > 0
    assert float(((drawn.mean(0) - x).abs() / steps).max()) < 0.13  # 5 times the deviation 0.5 / 20
    nearest = product(x, packed)
    assert float(((nearest - x).abs() / steps).mean()) > 4 * float(((drawn.mean(0) - x).abs() / steps).mean())


def test_rounding_bits_are_uniform() -> None:
    drawn = dither((3, 4), 200, 1000)
    assert abs(float(drawn.mean())) < 5 * 0.2887 / drawn.numel() ** 0.5
    assert abs(float((drawn[:, 1:] * drawn[:, :-1]).mean())) < 5 / 12 / drawn.numel() ** 0.5
    assert float(drawn.abs().max()) < 0.5


@pytest.mark.parametrize("key", [None, (5, 6)])
def test_int8_product_does_not_depend_on_threads(key: tuple[int, int] | None) -> None:
    x, weight = _numbers(701, 770), _numbers(150, 770, seed=1)
    assert_same_on_two_threads(
        lambda: [product(x, pack(weight, down=False), key=key), product(x, pack(weight.t().contiguous(), down=True))]
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_not_hidden_by_int8(bad: float) -> None:
    x, weight = _numbers(20, 300), _numbers(40, 300, seed=1)
    broken = x.clone()
    broken[3, 299] = bad
    found, whole = product(broken, pack(weight, down=False)), product(x, pack(weight, down=False))
    assert not bool(found[3].isfinite().any())
    others = [row for row in range(20) if row != 3]
    assert torch.equal(found[others], whole[others])
    weight[7, 0] = bad
    for packed in (pack(weight, down=False), pack(weight.t().contiguous(), down=True)):
        assert not bool(product(x, packed)[:, 7].isfinite().any())


def test_zeros_and_smallest_numbers_are_exact() -> None:
    weight, bias = _numbers(40, 300, seed=1), torch.randn(40)
    for x in (torch.zeros(5, 300), torch.full((5, 300), 1e-38), torch.full((5, 300), 1e-45)):
        assert torch.equal(product(x, pack(weight, down=False), bias), bias.expand(5, 40))


_OTHER_SET = """
import torch
from whet.kernels.int8 import pack, product
torch.manual_seed(0)
x, w, b = torch.randn(50, 700), torch.randn(70, 700), torch.randn(70)
for y in (product(x, pack(w, down=False), b), product(x, pack(w.t().contiguous(), down=True), b, (1, 2))):
    print(y.double().sum().item(), (y.double() ** 2).sum().item(), y[49, 69].item())
"""


def test_other_instruction_sets_agree() -> None:
    """Whole numbers are exact in each; scales and the sum over blocks may be rounded together or one by one."""
    found = []
    for level in ("v4", "v3", "baseline"):
        env = os.environ | {"WHET_ISA": level}
        done = subprocess.run([sys.executable, "-c", _OTHER_SET], env=env, capture_output=True, text=True, check=True)
        found.append([float(word) for word in done.stdout.split()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_step_packs_each_weight_once() -> None:
    weight = torch.nn.Parameter(_numbers(64, 128))
    step = product_int8.Step(1, 0)
    first = step.packed(weight, (weight,), down=False)
    assert step.packed(weight, (weight,), down=False) is first
    assert step.packed(weight, (weight,), down=True) is not first
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(product_int8.Step(1, 1).packed(weight, (weight,), down=False).scales, first.scales * 2)


def test_int8_gradients_match_the_reference() -> None:
    """That of the weight is fp32's; that of the input is within a few steps of 8 bits, on average none."""
    x, weight, bias = _numbers(96, 256), _numbers(64, 256, seed=1), torch.randn(64)
    grad = _numbers(96, 64, seed=2)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.linear(*leaves).backward(grad)
    ours = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    sums = torch.zeros_like(x)
    for number in range(50):
        for leaf in ours:
            leaf.grad = None
        product_int8.Step(3, number).linear(*ours, (ours[1],)).backward(grad)
        assert ours[0].grad is not None
        assert 1e-3 < relative(ours[0].grad, leaves[0].grad.double()) < 2e-2  # pyright: ignore[reportOptionalMemberAccess]
        sums += ours[0].grad
    for leaf, wanted in zip(ours[1:], leaves[1:], strict=True):
        assert relative(leaf.grad, wanted.grad.double()) < ROUNDING  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    # What is left is the rounding of the weight, which is to the nearest.
    assert relative(sums / 50, leaves[0].grad.double()) < 8e-3  # pyright: ignore[reportOptionalMemberAccess]


def test_input_gradient_can_run_in_fp32() -> None:
    x, weight, grad = _numbers(96, 256), _numbers(64, 256, seed=1), _numbers(96, 64, seed=2)
    leaf = x.clone().requires_grad_()
    product_int8.Step(3, 0, backward=False).linear(leaf, weight, None, (weight,)).backward(grad)
    assert relative(leaf.grad, grad.double() @ weight.double()) < ROUNDING  # pyright: ignore[reportArgumentType]
