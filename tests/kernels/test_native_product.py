"""Linear layers: whichever way a product takes, it is the textbook's, forward and backward."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import need_native
from torch.utils._python_dispatch import TorchDispatchMode

from whet.kernels import linear as layer
from whet.kernels import matrix as product

need_native()

SIZES = st.integers(1, 90)
# Sums of up to 900 products in fp32: errors grow like the root of their number times 2^-24, in units of the sum of the
# products' sizes (the sum itself may come out near 0).
RELATIVE = 2e-6


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach().double(), exact.detach()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 900), width=SIZES, out=SIZES, seed=st.integers(0, 9))
def test_weight_gradient_matches_the_textbook(rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    grad, x = torch.randn(rows, out), torch.randn(rows, width)
    dweight, dbias = product.weight_gradient(grad, x, bias=True)
    assert dbias is not None
    error = (dweight.double() - grad.double().t() @ x.double()).abs()
    assert (error <= RELATIVE * (grad.double().abs().t() @ x.double().abs())).all()
    assert ((dbias.double() - grad.double().sum(0)).abs() <= RELATIVE * grad.double().abs().sum(0)).all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 1, 1), (385, 385, 29), (769, 32, 14), (50, 1000, 5)])
def test_weight_gradient_is_exact_at_block_edges(shape: tuple[int, int, int]) -> None:
    rows, width, out = shape
    grad, x = torch.randn(rows, out), torch.randn(rows, width)
    dweight, dbias = product.weight_gradient(grad, x, bias=True)
    torch.testing.assert_close(dweight, (grad.double().t() @ x.double()).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dbias, grad.double().sum(0).float(), rtol=1e-4, atol=1e-4)


class _Operators(TorchDispatchMode):
    """Notes the names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_products_of_another_device_do_not_run_in_the_cpus_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, on which experts multiply, has no oneDNN, whatever is fastest on the processor next to it."""
    monkeypatch.setattr(product, "by_onednn", lambda: True)
    grad, weight = torch.empty(300, 128, device="meta"), torch.empty(128, 64, device="meta")
    with _Operators() as ran:
        assert product.input_gradient(grad, weight).shape == (300, 64)
    assert ran.names == ["aten.mm.default"]


HALF_SHAPES = [(0, 3, 4), (1, 1, 1), (2, 33, 15), (383, 40, 29), (769, 385, 14), (1537, 32, 14), (50, 1000, 5)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", HALF_SHAPES)
def test_gradient_of_bf16_is_summed_in_fp32(shape: tuple[int, int, int], add: bool) -> None:
    torch.manual_seed(1)
    rows, width, out = shape
    wide = torch.randn(rows, 2 * out + 3).bfloat16()
    grad, x = wide[:, 3 : 3 + out], torch.randn(rows, width).bfloat16()  # rows that are not next to each other
    dweight, dbias = torch.randn(out, width), torch.randn(out)
    before = (dweight.double(), dbias.double()) if add else (0.0, 0.0)
    wanted = before[0] + grad.double().t() @ x.double(), before[1] + grad.double().sum(0)
    sizes = before[0] + grad.double().abs().t() @ x.double().abs(), before[1] + grad.double().abs().sum(0)
    product.weight_gradient_into(dweight, dbias, grad, x, add=add)
    for found, exact, size in zip((dweight, dbias), wanted, sizes, strict=True):
        # products of bf16 are exact in fp32, so that only the sums are rounded
        assert ((found.double() - exact).abs() <= 10 * RELATIVE * (size.abs() + 1.0)).all()


def test_gradient_of_bf16_of_repeated_rows() -> None:
    grad, x = torch.ones(7, 20).bfloat16()[:1].expand(7, 20), torch.randn(7, 9).bfloat16()
    dweight = torch.empty(20, 9)
    product.weight_gradient_into(dweight, None, grad, x)
    torch.testing.assert_close(dweight, x.float().sum(0).expand(20, 9), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 5, 500])
def test_weight_gradient_is_added_to_what_is_there(rows: int) -> None:
    torch.manual_seed(0)
    grad, x, dweight, dbias = torch.randn(rows, 40), torch.randn(rows, 70), torch.randn(40, 70), torch.randn(40)
    wanted = dweight.double() + grad.double().t() @ x.double(), dbias.double() + grad.double().sum(0)
    product.weight_gradient_into(dweight, dbias, grad, x, add=True)
    for found, exact in zip((dweight, dbias), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)  # fp32 sums of 500 products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_does_not_depend_on_threads(dtype: torch.dtype) -> None:
    grad, x = torch.randn(801, 60).to(dtype), torch.randn(801, 800).to(dtype)
    before = torch.get_num_threads()
    found = []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            dweight, dbias = torch.empty(60, 800), torch.empty(60)
            product.weight_gradient_into(dweight, dbias, grad, x)
            found.append((dweight, dbias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("route", ["mkl", "onednn"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_libraries_match_torchs_linear(monkeypatch: pytest.MonkeyPatch, route: str, with_bias: bool) -> None:
    if route == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setenv(product.CHOICE, route)
    product.by_onednn.cache_clear()
    assert product.by_onednn() == (route == "onednn")
    x = torch.randn(2, 130, 128, requires_grad=True)
    weight = torch.randn(96, 128, requires_grad=True)
    bias = torch.randn(96, requires_grad=True) if with_bias else None
    assert x.numel() * 96 >= product._SMALL  # large enough to be sent on
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    y = layer.linear(x, weight, bias)
    grads = torch.autograd.grad(y.sin().sum(), leaves)
    product.by_onednn.cache_clear()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.nn.functional.linear(*doubles)
    expected = torch.autograd.grad(exact.sin().sum(), doubles)
    assert relative_error(y, exact) < RELATIVE
    # sin of numbers around 10: their rounding errors are ten times those of a number around 1
    assert all(relative_error(a, b) < 10 * RELATIVE for a, b in zip(grads, expected, strict=True))


def test_frozen_parts_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(product.CHOICE, "onednn")
    product.by_onednn.cache_clear()
    x, weight = torch.randn(300, 128), torch.randn(64, 128, requires_grad=True)
    layer.linear(x, weight).sum().backward()
    frozen = torch.randn(64, 128)
    y = layer.linear(x.requires_grad_(), frozen)
    y.sum().backward()
    product.by_onednn.cache_clear()
    assert weight.grad is not None
    assert frozen.grad is None
    assert x.grad is not None


def test_environment_selects_the_library() -> None:
    code = "from whet.kernels.matrix import by_onednn; print(by_onednn())"
    for asked, answer in (("mkl", "False"), ("onednn", "True")):
        found = subprocess.run(
            [sys.executable, "-c", code], env={"PATH": "", "WHET_PRODUCTS": asked, **_python_path()},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.strip() == answer


def _python_path() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "HOME", "LD_LIBRARY_PATH")}
