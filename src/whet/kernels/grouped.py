"""Products of tokens that are sorted by expert: each expert's tokens with its own weight, one product an expert.

All experts of a batch are multiplied in the same library. Were it chosen by the rows of each, a token's result would be
rounded by how many others were sent to its expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op, register_fake
from torch.nn import functional

from whet.kernels.matrix import input_gradient, product_of, suits_widened, weight_gradient_into
from whet.kernels.operator import once_differentiable

NAME = "whet::grouped_product"


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int]) -> Tensor:
    """Return y (N, M) for x (N, K): row n of expert e is x[n] @ weight[e] (M, K) transposed + bias[e] (M,).

    Expert e has the rows from ends[e - 1] to ends[e]. Rows from ends[-1] on belong to no expert, and their results are
    0. The gradient of an expert without rows is 0. Under autocast the result has autocast's dtype; without it, x and
    weight have one dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        if not suits_widened(x, weight, _rows_each(x, ends)):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    elif x.dtype != weight.dtype:
        functional.linear(x[:1], weight[0])  # torch's own error
    return _Grouped.apply(x, weight, bias, list(ends))


class _Grouped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends, ctx.has_bias = ends, bias is not None
        return grouped_product(x, weight, bias, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = _input_gradients(grad, weight, ctx.ends) if need_x else None
        dweight = dbias = None
        if need_weight or need_bias:
            dweight, dbias = _weight_gradients(grad, x, weight, ctx.ends, bias=ctx.has_bias)
        return dx, dweight, dbias, None


@custom_op(NAME, mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int]) -> Tensor:
    """Compute `grouped_linear`; to torch it is one operator, which selective checkpointing keeps the result of."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    n_rows = _rows_each(x, ends)
    for expert, rows in _rows_of(ends):
        y[rows] = product_of(x[rows], weight[expert], None if bias is None else bias[expert], n_rows=n_rows)
    y[_n_routed(ends) :] = 0.0
    return y


@register_fake(NAME)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _input_gradients(grad: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    dx = grad.new_empty(grad.shape[0], weight.shape[2])
    n_rows = _rows_each(grad, ends)
    for expert, rows in _rows_of(ends):
        dx[rows] = input_gradient(grad[rows], weight[expert], n_rows=n_rows)
    dx[_n_routed(ends) :] = 0.0
    return dx


def _weight_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, ends: Sequence[int], *, bias: bool
) -> tuple[Tensor, Tensor | None]:
    dweight = weight.new_empty(weight.shape)
    dbias = weight.new_empty(weight.shape[:2]) if bias else None
    first = 0
    for expert, end in enumerate(ends):
        of_bias = None if dbias is None else dbias[expert]
        if end > first:
            weight_gradient_into(dweight[expert], of_bias, grad[first:end], x[first:end])
        else:
            dweight[expert] = 0.0
            if of_bias is not None:
                of_bias.zero_()
        first = end
    return dweight, dbias


def _rows_each(x: Tensor, ends: Sequence[int]) -> int:
    """Return how many rows an expert has on average; those that belong to none count, or routing would change it."""
    return len(x) // max(len(ends), 1)


def _rows_of(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with these."""
    first = 0
    for expert, end in enumerate(ends):
        if end > first:
            yield expert, slice(first, end)
        first = end


def _n_routed(ends: Sequence[int]) -> int:
    return ends[-1] if ends else 0
