"""Rotary position embeddings of joined queries, keys and values (Su et al. 2021, equation 34, by halves of a head)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels.first_derivative import once_differentiable


def rotate_joined(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return qkv (N, 3, H, K) with queries and keys rotated by angles whose cosines and sines are (N, K).

    It computes in float32, or in float64 for float64, and rounds once. Backward keeps the angles alone.
    """
    if torch.compiler.is_compiling():
        return torch.cat([_rotated(qkv[:, :2], cos, sin), qkv[:, 2:]], dim=1)
    return _Rotate.apply(qkv, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (N, 2, H, K) with each channel c turned against channel c + K / 2."""
    c, s = (one[:, None, None].to(_format(x)).chunk(2, dim=-1) for one in (cos, sin))
    first, second = x.to(_format(x)).chunk(2, dim=-1)
    return torch.cat([first * c[0] - second * s[0], second * c[1] + first * s[1]], dim=-1).to(x.dtype)


def _format(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(qkv)
        out[:, :2] = _rotated(qkv[:, :2], cos, sin)
        out[:, 2] = qkv[:, 2]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        back = torch.cat(sin.chunk(2, dim=-1)[::-1], dim=-1)  # the other half's sine comes back
        out = torch.empty_like(grads[0])
        out[:, :2] = _rotated(grads[0][:, :2], cos, -back)
        out[:, 2] = grads[0][:, 2]
        return out, None, None
