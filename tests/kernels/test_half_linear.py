"""Linear layers under autocast in bf16: torch's product, and gradients of weight and bias that are summed in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_support import layer_inputs, need_native, position_of
from native_support import result_and_gradients as run
from torch import Tensor

from whet.kernels import linear as product
from whet.kernels import matrix
from whet.kernels.batch_position import Placement

need_native()
N, DEPTH, OUT = 37, 45, 29


@pytest.fixture(autouse=True)
def _by_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the native way on any processor: elsewhere it is slower, and the same."""
    monkeypatch.setattr(product, "by_pairs", lambda: True)
    monkeypatch.setattr(matrix, "is_widened", lambda: False)
    with Placement().at(position_of([N])), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return layer_inputs(dtype, N, DEPTH, OUT)


def copy_of_weight(y: Tensor) -> int:
    """Return the address of the copy that backward reads."""
    node: Any = y.grad_fn
    return node.saved_tensors[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product_and_input_gradient_are_those_of_autocast(dtype: torch.dtype, with_bias: bool) -> None:
    given = leaves(dtype)[: 3 if with_bias else 2]
    y, (dx, *_) = run(product.linear, given)
    expected, (expected_dx, *_) = run(torch.nn.functional.linear, given)
    assert type(y.grad_fn).__name__ == "_HalfLinearBackward"
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert torch.equal(dx, expected_dx)


def test_gradients_of_weight_and_bias_are_not_rounded_to_bf16() -> None:
    given = leaves()
    y, (_, dweight, dbias) = run(product.linear, given)
    wave = torch.sin(torch.arange(y.numel()).float()).view(N, OUT).bfloat16().double()
    x = given[0][0].detach().bfloat16().double()
    assert dweight.dtype == dbias.dtype == torch.float32
    # fp32 sums of 37 products around 1
    torch.testing.assert_close(dweight.double(), wave.t() @ x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dbias.double(), wave.sum(0), rtol=1e-5, atol=1e-5)


def test_layer_that_runs_twice_has_one_copy_in_bf16() -> None:
    x, weight, _ = leaves()
    first, second = product.linear(x, weight), product.linear(x, weight)
    assert copy_of_weight(first) == copy_of_weight(second)
    with Placement().at(position_of([N])):
        third = product.linear(x, weight)
    assert copy_of_weight(third) != copy_of_weight(first)


def test_changed_weight_is_read_by_the_next_pass() -> None:
    x, weight, _ = leaves()
    kept = product.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2.0)
    with Placement().at(position_of([N])):
        again = product.linear(x, weight)
    assert torch.equal(again, 2 * kept)


def test_frozen_input_and_frozen_weight_get_no_gradient() -> None:
    x, weight, bias = leaves()
    y = product.linear(x.detach(), weight, bias)
    y.float().sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert bias.grad is not None
    y = product.linear(x, weight.detach())
    assert type(y.grad_fn).__name__ != "_HalfLinearBackward"
    y.float().sum().backward()
    assert x.grad is not None


def test_other_passes_are_left_to_torch() -> None:
    x, weight, _ = leaves()
    with torch.no_grad():
        assert product.linear(x, weight).grad_fn is None
    with torch.autocast("cpu", enabled=False):
        assert product.linear(x, weight).dtype == torch.float32
    double = product.linear(x, weight.detach().bfloat16().requires_grad_())
    assert type(double.grad_fn).__name__ != "_HalfLinearBackward"


def test_no_tokens_give_zeros() -> None:
    _, weight, bias = leaves()
    y = product.linear(torch.randn(1, 0, DEPTH), weight, bias)
    y.float().sum().backward()
    assert y.shape == (1, 0, OUT)
    assert weight.grad is not None
    assert bias.grad is not None
    assert not weight.grad.any()
    assert not bias.grad.any()
