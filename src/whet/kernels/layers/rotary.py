"""Rotary position embeddings of queries and keys (Su et al. 2021, equation 34, by halves of a head)."""

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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (N, H, K) rotated by angles whose cosines and sines are (N, K), or for the first channels alone.

    It computes in float32, or in float64 for float64, and rounds once. Backward keeps the angles alone.
    """
    if torch.compiler.is_compiling():
        width = cos.shape[-1]
        return torch.cat([_rotated(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    return _RotateHeads.apply(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (N, ..., K) with each channel c turned against channel c + K / 2."""
    between = (1,) * (x.dim() - 2)
    c, s = (one.view(len(one), *between, -1).to(_format(x)).chunk(2, dim=-1) for one in (cos, sin))
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
        out = torch.empty_like(grads[0])
        out[:, :2] = _rotated(grads[0][:, :2], cos, _backwards(sin))
        out[:, 2] = grads[0][:, 2]
        return out, None, None


class _RotateHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _with_rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _with_rotated(grads[0], cos, _backwards(sin)), None, None


def _with_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return _rotated(x, cos, sin)
    out = torch.empty_like(x)
    out[..., :width] = _rotated(x[..., :width], cos, sin)
    out[..., width:] = x[..., width:]
    return out


def _backwards(sin: Tensor) -> Tensor:
    """Return the sines of the rotation backwards: those of the other half of each channel, negated."""
    return -torch.cat(sin.chunk(2, dim=-1)[::-1], dim=-1)
