"""Matrix products of linear layers, each in the fastest library on this CPU.

torch multiplies fp32 matrices with MKL. On processors that are not Intel's, MKL uses only AVX2; with AVX-512, oneDNN,
which torch contains too, is twice as fast. The gradient of the weight, whose product runs over the rows of both
matrices, is faster still as a native operator (`python benchmarks/cpu/products.py`). bf16 goes to oneDNN in
torch itself, but for that gradient: on processors that multiply pairs of bf16 it is native too, and summed and kept in
fp32, where torch rounds it to bf16 and widens it again.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from whet.card import Card
from whet.config import environment
from whet.hardware.cpu import features, vendor
from whet.kernels import structs
from whet.kernels.batch_position import running
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.library import library
from whet.kernels.native_call import DTYPES, call, is_followed, native_for, point, require

CARD = Card(
    name="matrix library",
    asked_by="default",
    does="fp32 products go to the library that is faster on this processor, MKL or oneDNN.",
    improves="speed",
    same_result="yes",
    hurts="On a processor where the choice is wrong: WHET_PRODUCTS changes it.",
    source="decision 4 of whet",
    page="matrix-products.md",
)

_SMALL = 1 << 20
"""Multiplications below which the call of oneDNN costs more than it saves."""
CHOICE = "WHET_PRODUCTS"
"""Environment variable: mkl or onednn, instead of the choice by processor."""

Linear = Callable[[Tensor, Tensor, Tensor | None, Sequence[Tensor]], Tensor]
"""A product of linear layers in another format: x, weight, bias, and the parameters that make up the weight."""
_HALVES: weakref.WeakKeyDictionary[object, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()
"""For each forward pass: its weights and their copies in bf16, as weak references."""
_FORMAT: ContextVar[Linear | None] = ContextVar("whet_linear_format", default=None)


@contextmanager
def multiplied_by(way: Linear | None) -> Iterator[None]:
    """Run the block, a forward or a backward pass, with this product for linear layers; None: in fp32."""
    token = _FORMAT.set(way)
    try:
        yield
    finally:
        _FORMAT.reset(token)


def is_reformatted() -> bool:
    """Return whether linear layers now multiply in another format, by a product of their own."""
    return _FORMAT.get() is not None


@cache
def by_onednn() -> bool:
    """Return whether fp32 products of linear layers run in oneDNN in this process."""
    if not torch.backends.mkldnn.is_available():
        return False
    if asked := environment.value(CHOICE):
        return asked == "onednn"
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return capable and vendor() not in ("GenuineIntel", "")


@cache
def by_pairs() -> bool:
    """Return whether the native gradient of a weight is the fast one in bf16: without AMX, which oneDNN uses."""
    native, found = library(), ctypes.c_int32(0)
    if native is None or "amx_bf16" in features():
        return False
    native.call("bf16_support", structs.Bf16Support(ctypes.addressof(found)))
    return bool(found.value)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: Sequence[Tensor] = ()) -> Tensor:
    """Return x (..., K) @ weight (M, K) transposed + bias (M,), equal to torch's own linear to rounding.

    `parts` are the parameters whose rows make up the weight; none: the weight is a parameter.
    """
    other = None if torch.compiler.is_compiling() else _FORMAT.get()
    if other is not None:
        return other(x, weight, bias, parts or (weight,))
    if _suits(x, weight):
        return _Linear.apply(x, weight, bias)
    if _suits_pairs(x, weight):
        return _HalfLinear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if is_followed() or torch.is_autocast_enabled("cpu"):
        return False
    return x.numel() * weight.shape[0] >= _SMALL and by_onednn()


def _suits_pairs(x: Tensor, weight: Tensor) -> bool:
    """Return whether a pass under autocast in bf16 computes the gradient of this weight, and pairs are the fast way."""
    if is_followed() or not (torch.is_autocast_enabled("cpu") and weight.requires_grad and torch.is_grad_enabled()):
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or running() is None:
        return False
    on_cpu = x.device.type == weight.device.type == "cpu"
    return on_cpu and x.dtype in DTYPES and weight.dtype == torch.float32 and by_pairs()


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _times_transposed(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        need_x, need_weight, _ = ctx.needs_input_grad
        dx = input_gradient(grad, weight).view(x.shape) if need_x else None
        if not need_weight:
            return dx, None, grad.sum(0) if ctx.has_bias else None
        return dx, *weight_gradient(grad, rows, bias=ctx.has_bias)


class _HalfLinear(Function):
    """Products in bf16 of an fp32 weight, as autocast has them, with the gradients of weight and bias in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half, rows = _half_of(weight), x.to(torch.bfloat16)
        ctx.save_for_backward(rows, half)
        ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
        return functional.linear(rows, half, None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, half = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        dx = input_gradient(grad, half).view(x.shape).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None if ctx.bias is None else grad.float().sum(0).to(ctx.bias)
        dweight = torch.empty(half.shape, dtype=torch.float32)
        dbias = None if ctx.bias is None else torch.empty(len(half), dtype=torch.float32)
        weight_gradient_into(dweight, dbias, grad, rows)
        return dx, dweight, None if dbias is None else dbias.to(ctx.bias)


def _half_of(weight: Tensor) -> Tensor:
    """Return the weight in bf16; a layer that a pass runs several times has one copy, as under autocast."""
    made = _HALVES.setdefault(running(), {})
    known, half = (one() for one in made.get(id(weight), (lambda: None, lambda: None)))
    if known is weight and half is not None:
        return half
    half = weight.to(torch.bfloat16)
    made[id(weight)] = weakref.ref(weight), weakref.ref(half)
    return half


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return grad (N, M) @ weight (M, K)."""
    onednn = by_onednn() and grad.dtype == torch.float32
    return _times_transposed(grad, weight.t()) if onednn else torch.mm(grad, weight)


def weight_gradient(grad: Tensor, x: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return (grad (N, M) transposed @ x (N, K), the sum of grad's rows (M,) or None), in fp32."""
    dweight = grad.new_empty(grad.shape[1], x.shape[1])
    dbias = grad.new_empty(grad.shape[1]) if bias else None
    weight_gradient_into(dweight, dbias, grad, x)
    return dweight, dbias


def weight_gradient_into(dweight: Tensor, dbias: Tensor | None, grad: Tensor, x: Tensor, *, add: bool = False) -> None:
    """Write what `weight_gradient` returns to contiguous tensors of that shape, or add it to what they hold."""
    if native_for(grad, x) is None and dweight.dtype != grad.dtype:
        grad, x = grad.to(dweight.dtype), x.to(dweight.dtype)
    if native_for(grad, x) is None or dweight.dtype != torch.float32:
        torch.addmm(dweight, grad.t(), x, out=dweight) if add else torch.mm(grad.t(), x, out=dweight)
        if dbias is not None:
            dbias.add_(grad.sum(0)) if add else torch.sum(grad, 0, out=dbias)
        return
    grad, x = grad if grad.stride(1) == 1 else grad.contiguous(), x.contiguous()
    fits = len(grad) == len(x) and dweight.shape == (grad.shape[1], x.shape[1]) and dweight.is_contiguous()
    require(fits and (dbias is None or dbias.shape == grad.shape[1:]), "weight_gradient", grad, x, dweight, dbias)
    args = structs.WeightGradient(*x.shape, grad.shape[1], grad.stride(0), DTYPES[x.dtype], add)
    call("weight_gradient", point(args, dy=grad, x=x, dweight=dweight, dbias=dbias))


def product_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (N, K) @ weight (M, K) transposed + bias (M,), without a gradient."""
    if _suits(x, weight):
        return _times_transposed(x, weight, bias)
    return functional.linear(x, weight, bias)


def _times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a (N, K) @ b (M, K) transposed + bias (M,), in oneDNN; a and b may be transposed views."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
