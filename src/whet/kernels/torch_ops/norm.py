"""`whet::add_norm` and its gradient."""

from typing import Any

from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake

from whet.kernels.layers.norm import NormSaved, NormSettings, add_norm_outputs
from whet.kernels.layers.norm import add_norm_backward as backward_of
from whet.kernels.layers.norm import add_norm_forward as forward_of
from whet.kernels.torch_ops.arguments import drop_of, or_empty, or_none, shaped_as

NAME = "whet::add_norm"
_BACKWARD = "whet::add_norm_backward"


@custom_op(NAME, mutates_args=())
def add_norm(
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
    y, total, stats = forward_of(x, residual, linear_bias, weight, bias, settings)
    assert total is not None  # there is a residual
    return y, total, stats


@register_fake(NAME)
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return add_norm_outputs(x)


@custom_op(_BACKWARD, mutates_args=())
def add_norm_backward(
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
    found = backward_of(dy, dsum_in, NormSaved(total, stats, weight, dtype, bias is not None), settings)
    dx = or_empty(None if settings.drop is None else found.dx, total)
    return dx, found.dsum, or_empty(found.dlinear_bias, weight), found.dweight, or_empty(found.dbias, weight)


@register_fake(_BACKWARD)
def _(dy: Tensor, dsum_in: Tensor | None, total: Tensor, stats: Tensor, weight: Tensor, *rest: Any) -> Any:
    bias, linear_bias, _, _, _, keys, *_ = rest
    dx = shaped_as(None if keys is None else total, total)
    dlinear, dweight, dbias = (shaped_as(one, weight) for one in (linear_bias, weight, bias))
    return dx, shaped_as(total, total), dlinear, dweight, dbias


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, linear_bias, weight, bias, _, ctx.rms, ctx.p, ctx.site, keys, slots, positions = inputs
    _, total, stats = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, stats, weight, bias, linear_bias, keys, slots, positions)


def _gradient(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None, _: Any) -> Any:
    total, stats, weight, bias, linear_bias, *mask = ctx.saved_tensors
    dy = total.new_zeros(total.shape) if dy is None else dy
    found = add_norm_backward(dy, dsum_in, total, stats, weight, bias, linear_bias, ctx.rms, ctx.p, ctx.site, *mask)
    dx, dsum, dlinear, dweight, dbias = found
    dx = dsum if mask[0] is None else dx
    dlinear = or_none(dlinear, wanted=linear_bias is not None)
    return dx, dsum, dlinear, dweight, or_none(dbias, wanted=bias is not None), *(None,) * 7


register_autograd(NAME, _gradient, setup_context=_save)
