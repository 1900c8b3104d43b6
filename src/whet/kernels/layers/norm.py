"""Bias, dropout, residual and normalisation in one forward and one backward pass."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.layers import recompute
from whet.kernels.native_call import DTYPES, call, float32, floats, mask_of, native_for, require, rows_of
from whet.kernels.reference import layers as reference
from whet.kernels.specs import Drop, Norm


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, *, linear_bias: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalised(s), s) with s = residual + dropout(x + linear_bias).

    `linear_bias` is the bias of the linear layer that made x, whose product is without it. Blocks that normalise first
    use both results; blocks that normalise last use only the first. Backward needs s and two numbers per row.
    """
    if residual is not None and graph.holds(x, residual, drop=drop):
        parts = (x, residual, linear_bias, norm.weight, norm.bias, norm.eps, norm.rms)
        return torch.ops.whet.add_norm(*parts, *graph.mask_arguments(drop))[:2]
    if native_for(x, residual) is None:
        return reference.add_norm(x, residual, norm, linear_bias=linear_bias, drop=drop)
    drop = None if drop is not None and drop.p == 0.0 else drop
    y, total = _AddNorm.apply(x, residual, linear_bias, norm.weight, norm.bias, NormSettings(norm.eps, norm.rms, drop))
    total = x if total is None else total
    kept, again = total.detach(), (norm.weight, norm.bias, NormSettings(norm.eps, norm.rms, None))
    recompute.register(y, lambda: _AddNorm.apply(kept, None, None, *again)[0])
    return y, total


@dataclass(frozen=True)
class NormSettings:
    """What `add_norm_forward` and `add_norm_backward` need besides tensors. `drop` is None without dropout."""

    eps: float
    rms: bool
    drop: Drop | None


class NormSaved(NamedTuple):
    """What backward needs of the forward pass."""

    total: Tensor
    """The sum that was normalised, contiguous."""
    stats: Tensor
    """(2, rows) fp32: mean and 1 / deviation of each row."""
    weight: Tensor
    linear_bias_dtype: torch.dtype | None
    """None: there was no linear bias."""
    has_bias: bool


class NormGradients(NamedTuple):
    """Gradients, in the dtypes of their tensors; None for an absent bias."""

    dx: Tensor
    """Without dropout the same tensor as `dsum`."""
    dsum: Tensor
    """The gradient of the sum, which is that of the residual."""
    dlinear_bias: Tensor | None
    dweight: Tensor
    dbias: Tensor | None


def add_norm_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return new tensors for the result, the sum and `NormSaved.stats`, not yet written."""
    stats = x.new_empty((2, math.prod(x.shape[:-1])), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), stats


def add_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    linear_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: NormSettings,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the result, the sum and `NormSaved.stats`. The sum is None if it is x: nothing is added or dropped."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    rows, drop = rows_of(x), settings.drop
    y, total, stats = add_norm_outputs(x)
    total = None if residual is None and linear_bias is None and drop is None else total
    mean, rstd = stats.unbind()
    w, b, lb = float32(weight), float32(bias), float32(linear_bias)
    fits = all(one is None or one.numel() == x.shape[-1] for one in (w, b, lb))
    fits = fits and (residual is None or (rows_of(residual) == rows and residual.shape[-1] == x.shape[-1]))
    require(fits, "add_norm", x, residual, w, b, lb)
    how = {"dtype": DTYPES[x.dtype], "rms": settings.rms, "eps": settings.eps, "mask": mask_of(drop, rows)}
    given = {"x": x, "residual": residual, "linear_bias": lb, "weight": w, "bias": b}
    call("add_norm", rows=rows, width=x.shape[-1], **how, **given, sum=total, y=y, mean=mean, rstd=rstd)
    return y, total, stats


def add_norm_backward(
    dy: Tensor | None, dsum_in: Tensor | None, saved: NormSaved, settings: NormSettings
) -> NormGradients:
    """Return the gradients for those of the result and of the sum; None stands for zeros."""
    total, stats, weight, linear_bias_dtype, has_bias = saved
    width, rows, drop = total.shape[-1], rows_of(total), settings.drop
    dy = torch.zeros_like(total) if dy is None else dy.contiguous()
    dsum_in = None if dsum_in is None else dsum_in.contiguous()
    dsum = torch.empty_like(total)
    dx = dsum if drop is None else torch.empty_like(total)
    dweight, w, (mean, rstd) = floats(width), float32(weight), stats.unbind()
    dbias = floats(width) if has_bias else None
    dlinear = None if linear_bias_dtype is None else floats(width)
    how = {"dtype": DTYPES[total.dtype], "rms": settings.rms, "mask": mask_of(drop, rows)}
    given = {"dy": dy, "dsum_in": dsum_in, "sum": total, "mean": mean, "rstd": rstd, "weight": w}
    gradients = {"dx": None if dx is dsum else dx, "dweight": dweight, "dbias": dbias, "dlinear_bias": dlinear}
    call("add_norm_backward", rows=rows, width=width, **how, **given, dsum=dsum, **gradients)
    dbias = None if dbias is None else dbias.to(weight.dtype)
    dlinear = None if dlinear is None else dlinear.to(linear_bias_dtype)
    return NormGradients(dx, dsum, dlinear, dweight.to(weight.dtype), dbias)


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        x, (_, linear_bias, weight, bias, settings) = x.contiguous(), rest
        y, total, stats = add_norm_forward(x, *rest)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        ctx.biases = (None if linear_bias is None else linear_bias.dtype, bias is not None)
        ctx.save_for_backward(x if total is None else total, stats, weight)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = add_norm_backward(dy, dsum_in, NormSaved(*ctx.saved_tensors, *ctx.biases), ctx.settings)
        dresidual = found.dsum if ctx.needs_input_grad[1] else None
        return found.dx, dresidual, found.dlinear_bias, found.dweight, found.dbias, None
