"""Products of a frozen linear layer with its low-rank pair (LoRA: Hu et al. 2021, arXiv:2106.09685, equation 3).

x W' + s (x A') B' is one product of (x, x A') and (W, s B). The copies that this takes are linear in the sizes of x
and W; in return the result is written once, where two products, a factor and a sum write it four times. The gradient of
x is one product in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels.first_derivative import once_differentiable
from whet.kernels.native_call import is_followed
from whet.kernels.products.linear import is_reformatted
from whet.kernels.products.matrix import input_gradient, is_widened, product_of, weight_gradient


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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
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
