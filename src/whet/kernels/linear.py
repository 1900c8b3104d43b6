"""Linear layers: products with the gradients of input, weight and bias, in the format that runs.

Under autocast in bf16, the gradient of a weight is summed and kept in fp32, where torch rounds it to bf16 and widens it
again. Where products of bf16 are faster in fp32 (`matrix.is_widened`), a weight in fp32 is multiplied as it is, and
only input and result are bf16.

A frozen layer is joined with its low-rank pair (LoRA: Hu et al. 2021, arXiv:2106.09685, equation 3): x W' + s (x A') B'
is one product of (x, x A') and (W, s B). The copies that this takes are linear in the sizes of x and W; in return the
result is written once, where two products, a factor and a sum write it four times. The gradient of x is one product in
the same way.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from whet.kernels.batch_position import running
from whet.kernels.matrix import (
    by_pairs,
    input_gradient,
    is_faster_widened,
    is_widened,
    product_of,
    suits_onednn,
    times_transposed,
    weight_gradient,
    weight_gradient_into,
    widened_product,
)
from whet.kernels.operator import DTYPES, floats, is_followed, once_differentiable

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: Sequence[Tensor] = ()) -> Tensor:
    """Return x (..., K) @ weight (M, K) transposed + bias (M,), equal to torch's own linear to rounding.

    `parts` are the parameters whose rows make up the weight; none: the weight is a parameter.
    """
    other = None if torch.compiler.is_compiling() else _FORMAT.get()
    if other is not None:
        return other(x, weight, bias, parts or (weight,))
    if suits_onednn(x, weight):
        return _Linear.apply(x, weight, bias)
    if _is_in_bf16(x, weight) and is_faster_widened(x, weight):
        return _WidenedLinear.apply(x, weight, bias)
    if _suits_pairs(x, weight):
        return _HalfLinear.apply(x, weight, bias)
    return functional.linear(x, weight, bias)


def _is_in_bf16(x: Tensor, weight: Tensor) -> bool:
    """Return whether the result is bf16: under autocast, or because both factors are."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == weight.dtype == torch.bfloat16


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
        rows = _rows_of(x)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        return times_transposed(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (rows, weight), grad = ctx.saved_tensors, _rows_of(grads[0])
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = input_gradient(grad, weight).view(ctx.shape) if need_x else None
        if not need_weight:
            return dx, None, grad.sum(0) if need_bias else None
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, half = ctx.saved_tensors
        rows, grad = _rows_of(x), _rows_of(grads[0])
        dx = input_gradient(grad, half).view(x.shape).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, grad.float().sum(0).to(ctx.bias) if ctx.needs_input_grad[2] else None
        return dx, *_gradients_in_fp32(grad, rows, half, ctx.bias)


class _WidenedLinear(Function):
    """Products in bf16 where fp32 is faster: input and result are bf16, what multiplies is fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = x.to(torch.bfloat16)
        ctx.save_for_backward(half if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.dtype, ctx.bias = x.shape, x.dtype, None if bias is None else bias.dtype
        return widened_product(_rows_of(half), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, _rows_of(grads[0])
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = widened_product(grad, weight.t(), None).view(ctx.shape).to(ctx.dtype) if need_x else None
        if not need_weight:
            return dx, None, grad.float().sum(0).to(ctx.bias) if need_bias else None
        dweight, dbias = _gradients_in_fp32(grad, _rows_of(x), weight, ctx.bias)
        return dx, dweight.to(weight.dtype), dbias


def _rows_of(x: Tensor) -> Tensor:
    """Return x (..., K) as (N, K)."""
    return x.reshape(-1, x.shape[-1])


def _gradients_in_fp32(
    grad: Tensor, x: Tensor, weight: Tensor, bias: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a weight (M, K), in fp32, and of its bias in the dtype that is named, if it has one."""
    dweight = floats(*weight.shape)
    dbias = None if bias is None else floats(len(weight))
    weight_gradient_into(dweight, dbias, grad, x)
    return dweight, dbias if dbias is None else dbias.to(bias)


def _half_of(weight: Tensor) -> Tensor:
    """Return the weight in bf16; a layer that a pass runs several times has one copy, as under autocast."""
    made = _HALVES.setdefault(running(), {})
    known, half = (one() for one in made.get(id(weight), (lambda: None, lambda: None)))
    if known is weight and half is not None:
        return half
    half = weight.to(torch.bfloat16)
    made[id(weight)] = weakref.ref(weight), weakref.ref(half)
    return half


@dataclass(frozen=True)
class LowRank:
    """The pair of a layer: `down` A (R, K), `up` B (M, R), and the factor s of their product."""

    down: Tensor
    up: Tensor
    scale: float


def is_joined(x: Tensor) -> bool:
    """Return whether `low_rank_linear` serves x: on a CPU, without a compiler, and no product in another format."""
    return x.device.type == "cpu" and not is_followed() and not is_reformatted()


def low_rank_linear(x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, pair: LowRank) -> Tensor:
    """Return x (..., K) @ weight (M, K)' + bias (M,) + s * (dropped (..., K) @ A') @ B', shape (..., M).

    `dropped` is what the pair reads in place of x, where it has a dropout; None: x. Under autocast the products are in
    its format, and so is the result.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return _LowRank.apply(x, dropped, weight, bias, pair.down, pair.up, pair.scale, dtype)


class _LowRank(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor,
        scale: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        rows = x.flatten(0, -2).to(dtype)
        read = rows if dropped is None else dropped.flatten(0, -2).to(dtype)
        wide = _format_of_weights(dtype)
        with torch.autocast("cpu", enabled=False):
            inner = product_of(read, down.to(wide), None)
            joint = _joined(weight, up * scale, 1, wide)
            result = product_of(torch.cat([rows, inner], 1), joint, None if bias is None else bias.to(wide))
        ctx.save_for_backward(rows if weight.requires_grad else None, read, weight, down, up, inner)
        ctx.scale, ctx.dropped, ctx.shape = scale, dropped is not None, x.shape
        ctx.dtypes = x.dtype, None if dropped is None else dropped.dtype
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, read, weight, down, up, inner = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        need, wide = ctx.needs_input_grad, _format_of_weights(grad.dtype)
        of_inner = input_gradient(grad, (up * ctx.scale).to(wide))
        dx = ddropped = None
        if need[0] and not ctx.dropped:
            dx = input_gradient(torch.cat([grad, of_inner], 1), _joined(weight, down, 0, wide))
        elif need[0]:
            dx = input_gradient(grad, weight.to(wide))
        if need[1]:
            ddropped = input_gradient(of_inner, down.to(wide)).view(ctx.shape).to(ctx.dtypes[1])
        dweight = weight_gradient(grad, rows, bias=False)[0].to(weight.dtype) if need[2] else None
        dbias = grad.sum(0) if need[3] else None
        ddown = weight_gradient(of_inner, read, bias=False)[0].to(down.dtype) if need[4] else None
        dup = (weight_gradient(grad, inner, bias=False)[0] * ctx.scale).to(up.dtype) if need[5] else None
        dx = None if dx is None else dx.view(ctx.shape).to(ctx.dtypes[0])
        return dx, ddropped, dweight, dbias, ddown, dup, None, None


def _format_of_weights(dtype: torch.dtype) -> torch.dtype:
    """Return the format that weights multiply in: fp32, as they are, where bf16 would be widened."""
    return torch.float32 if dtype == torch.bfloat16 and is_widened() else dtype


def _joined(weight: Tensor, more: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return both matrices as one of this format, joined along a dimension, in one pass over them."""
    return torch.cat([weight, more], dim, out=weight.new_empty(0, dtype=dtype))
