"""`whet::bias_act` and its gradient."""

from typing import Any

from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake

from whet.kernels.layers.activation import bias_act_backward as backward_of
from whet.kernels.layers.activation import bias_act_forward as forward_of
from whet.kernels.torch_ops.arguments import or_empty, or_none, shaped_as

NAME = "whet::bias_act"
_BACKWARD = "whet::bias_act_backward"


@custom_op(NAME, mutates_args=())
def bias_act(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """Return act(x + bias); `kind` is a number of `Activation`."""
    return forward_of(x, bias, kind)


@register_fake(NAME)
def _(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(_BACKWARD, mutates_args=())
def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of bias."""
    dx, dbias = backward_of(dy, x, bias, kind)
    return dx, or_empty(dbias, x)


@register_fake(_BACKWARD)
def _(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    return shaped_as(x, x), shaped_as(bias, x)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _gradient(ctx: Any, dy: Tensor) -> Any:
    x, bias = ctx.saved_tensors
    dx, dbias = bias_act_backward(dy, x, bias, ctx.kind)
    return dx, or_none(dbias, wanted=bias is not None), None


register_autograd(NAME, _gradient, setup_context=_save)
