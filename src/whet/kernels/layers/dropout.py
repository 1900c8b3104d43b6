"""Dropout of hidden states, with a mask that is a function of the position: no mask is stored."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.native_call import DTYPES, call, mask_of, native_for, rows_of
from whet.kernels.reference import layers as reference
from whet.kernels.specs import Drop


def dropout(x: Tensor, drop: Drop) -> Tensor:
    """Return x (..., D) with channels dropped and the kept ones scaled by 1 / (1 - p)."""
    if graph.holds(x, drop=drop):
        return torch.ops.whet.dropout(x, *graph.mask_arguments(drop))
    if native_for(x) is None:
        return reference.dropout(x, drop)
    return _Dropout.apply(x, drop)


def dropout_forward(x: Tensor, drop: Drop) -> Tensor:
    """Return x with channels dropped. The gradient of x is the same function of the gradient of the result."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = rows_of(x)
    call("dropout", rows=rows, width=x.shape[-1], dtype=DTYPES[x.dtype], mask=mask_of(drop, rows), x=x, y=y)
    return y


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: Drop) -> Tensor:
        ctx.drop = drop
        return dropout_forward(x, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dropout_forward(grads[0], ctx.drop), None
