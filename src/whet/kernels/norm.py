"""Bias, dropout, residual and normalisation in one forward and one backward pass."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph, recompute
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import drop_of, dropped, mask_arguments, mask_of
from whet.kernels.operator import DTYPES, call, float32, floats, misfit, native_for, once_differentiable, rows_of, wide


@dataclass(frozen=True)
class Norm:
    """The parameters (D,) of a LayerNorm (Ba et al. 2016) or, without mean, an RMSNorm (Zhang and Sennrich 2019)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool = False


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, *, linear_bias: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalised(s), s) with s = residual + dropout(x + linear_bias).

    `linear_bias` is the bias of the linear layer that made x, whose product is without it. Blocks that normalise first
    use both results; blocks that normalise last use only the first. Backward needs s and two numbers per row.
    """
    if residual is not None and graph.holds(x, residual, drop=drop):
        parts = (x, residual, linear_bias, norm.weight, norm.bias, norm.eps, norm.rms)
        return torch.ops.whet.add_norm(*parts, *mask_arguments(drop))[:2]
    if native_for(x, residual) is None:
        return add_norm_reference(x, residual, norm, linear_bias=linear_bias, drop=drop)
    drop = None if drop is not None and drop.p == 0.0 else drop
    y, total = _AddNorm.apply(x, residual, linear_bias, norm.weight, norm.bias, NormSettings(norm.eps, norm.rms, drop))
    total = x if total is None else total
    kept, again = total.detach(), (norm.weight, norm.bias, NormSettings(norm.eps, norm.rms, None))
    recompute.register(y, lambda: _AddNorm.apply(kept, None, None, *again)[0])
    return y, total


def add_norm_reference(
    x: Tensor, residual: Tensor | None, norm: Norm, *, linear_bias: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` in plain torch, also in float64."""
    s = wide(x)
    if linear_bias is not None:
        s = s + wide(linear_bias)
    if drop is not None:
        s = dropped(s, drop)
    if residual is not None:
        s = s + wide(residual)
    s = s.to(x.dtype)
    return normalised(wide(s), norm).to(x.dtype), s


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """Return x, of the format to compute in, normalised, in plain torch."""
    centred = x if norm.rms else x - x.mean(-1, keepdim=True)
    square = centred.square().mean(-1, keepdim=True)
    # An overflow must be visible: x / inf would be 0, and a broken row would look valid.
    inverse = torch.where(square.isinf(), torch.nan, torch.rsqrt(square + norm.eps))
    y = centred * inverse * wide(norm.weight)
    return y if norm.bias is None else y + wide(norm.bias)


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
    (rows, width), drop = rows_of(x), settings.drop
    y, total, stats = add_norm_outputs(x)
    total = None if residual is None and linear_bias is None and drop is None else total
    mean, rstd = stats.unbind()
    w, b, lb = float32(weight), float32(bias), float32(linear_bias)
    fits = weight.numel() == width and (b is None or b.numel() == width) and (lb is None or lb.numel() == width)
    if not (fits and (residual is None or rows_of(residual) == (rows, width))):
        raise misfit("add_norm", x, residual, w, b, lb)
    call(
        "add_norm",
        rows=rows,
        width=width,
        dtype=DTYPES[x.dtype],
        rms=settings.rms,
        eps=settings.eps,
        mask=mask_of(drop, rows),
        x=x,
        residual=residual,
        linear_bias=lb,
        weight=w,
        bias=b,
        sum=total,
        y=y,
        mean=mean,
        rstd=rstd,
    )
    return y, total, stats


def add_norm_backward(
    dy: Tensor | None, dsum_in: Tensor | None, saved: NormSaved, settings: NormSettings
) -> NormGradients:
    """Return the gradients for those of the result and of the sum; None stands for zeros."""
    total, stats, weight, linear_bias_dtype, has_bias = saved
    (rows, width), drop = rows_of(total), settings.drop
    dy = torch.zeros_like(total) if dy is None else dy.contiguous()
    dsum_in = None if dsum_in is None else dsum_in.contiguous()
    dsum = torch.empty_like(total)
    dx = dsum if drop is None else torch.empty_like(total)
    dweight, w, (mean, rstd) = floats(width), float32(weight), stats.unbind()
    dbias = floats(width) if has_bias else None
    dlinear = None if linear_bias_dtype is None else floats(width)
    call(
        "add_norm_backward",
        rows=rows,
        width=width,
        dtype=DTYPES[total.dtype],
        rms=settings.rms,
        mask=mask_of(drop, rows),
        dy=dy,
        dsum_in=dsum_in,
        sum=total,
        mean=mean,
        rstd=rstd,
        weight=w,
        dsum=dsum,
        dx=None if dx is dsum else dx,
        dweight=dweight,
        dbias=dbias,
        dlinear_bias=dlinear,
    )
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
    def backward(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None) -> tuple[Any, ...]:
        found = add_norm_backward(dy, dsum_in, NormSaved(*ctx.saved_tensors, *ctx.biases), ctx.settings)
        dresidual = found.dsum if ctx.needs_input_grad[1] else None
        return found.dx, dresidual, found.dlinear_bias, found.dweight, found.dbias, None


def _add_norm_in_graph(
    x: Tensor,
    residual: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normalised(s), s, `NormSaved.stats`) with s = residual + dropout(x + linear_bias)."""
    settings = NormSettings(eps, rms, drop_of(p, site, keys, slots, positions))
    y, total, stats = add_norm_forward(x, residual, linear_bias, weight, bias, settings)
    assert total is not None  # there is a residual
    return y, total, stats


def _add_norm_backward_in_graph(
    dy: Tensor,
    dsum_in: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    rms: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty: it is that of the sum), of the sum, of linear_bias, weight and bias."""
    settings = NormSettings(0.0, rms, drop_of(p, site, keys, slots, positions))
    dtype = None if linear_bias is None else linear_bias.dtype
    found = add_norm_backward(dy, dsum_in, NormSaved(total, stats, weight, dtype, bias is not None), settings)
    dx = graph.or_empty(None if settings.drop is None else found.dx, total)
    return (
        dx,
        found.dsum,
        graph.or_empty(found.dlinear_bias, weight),
        found.dweight,
        graph.or_empty(found.dbias, weight),
    )


def _fake_backward(dy: Tensor, dsum_in: Tensor | None, total: Tensor, stats: Tensor, weight: Tensor, *rest: Any) -> Any:
    bias, linear_bias, _, _, _, keys, *_ = rest
    dx = graph.shaped_as(None if keys is None else total, total)
    dlinear, dweight, dbias = (graph.shaped_as(one, weight) for one in (linear_bias, weight, bias))
    return dx, graph.shaped_as(total, total), dlinear, dweight, dbias


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, linear_bias, weight, bias, _, ctx.rms, ctx.p, ctx.site, keys, slots, positions = inputs
    _, total, stats = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, stats, weight, bias, linear_bias, keys, slots, positions)


def _gradient(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None, _: Any) -> Any:
    total, stats, weight, bias, linear_bias, *mask = ctx.saved_tensors
    dy = total.new_zeros(total.shape) if dy is None else dy
    found = torch.ops.whet.add_norm_backward(
        dy, dsum_in, total, stats, weight, bias, linear_bias, ctx.rms, ctx.p, ctx.site, *mask
    )
    dx, dsum, dlinear, dweight, dbias = found
    dx = dsum if mask[0] is None else dx
    dlinear = graph.or_none(dlinear, wanted=linear_bias is not None)
    return dx, dsum, dlinear, dweight, graph.or_none(dbias, wanted=bias is not None), *(None,) * 7


graph.operator("add_norm", _add_norm_in_graph, lambda x, *rest: add_norm_outputs(x), save=_save, gradient=_gradient)
graph.operator("add_norm_backward", _add_norm_backward_in_graph, _fake_backward)
