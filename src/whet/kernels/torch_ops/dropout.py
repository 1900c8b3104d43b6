"""`whet::dropout`, whose gradient is the same operator."""

from typing import Any

from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake

from whet.kernels.layers.dropout import dropout_forward
from whet.kernels.torch_ops.arguments import drop_of

NAME = "whet::dropout"


@custom_op(NAME, mutates_args=())
def dropout(x: Tensor, p: float, site: int, keys: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Return x with channels dropped."""
    drop = drop_of(p, site, keys, slots, positions)
    assert drop is not None
    return dropout_forward(x, drop)


@register_fake(NAME)
def _(x: Tensor, *mask: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.p, ctx.site, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor) -> Any:
    return dropout(dy, ctx.p, ctx.site, *ctx.saved_tensors), None, None, None, None, None


register_autograd(NAME, _gradient, setup_context=_save)
