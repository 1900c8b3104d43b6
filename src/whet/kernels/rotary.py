"""Rotary position embeddings of queries and keys (Su et al. 2021, equation 34, by halves of a head)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels.operator import DTYPES, call, native_for, once_differentiable


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
    c, s = (one.view(len(one), *between, one.shape[-1]).to(_format(x)).chunk(2, dim=-1) for one in (cos, sin))
    first, second = x.to(_format(x)).chunk(2, dim=-1)
    return torch.cat([first * c[0] - second * s[0], second * c[1] + first * s[1]], dim=-1).to(x.dtype)


def _format(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _joined_turned(qkv, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _joined_turned(grads[0], cos, sin, back=True), None, None


class _RotateHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, grads[0].shape[1], back=True), None, None


def _joined_turned(qkv: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    return _turned(qkv.flatten(1, 2), cos, sin, 2 * qkv.shape[2], back=back).view(qkv.shape)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, n_heads: int, *, back: bool = False) -> Tensor:
    """Return x (N, H, K), contiguous, with the first `n_heads` heads rotated, or rotated backwards."""
    if native_for(x) is None:
        return _turned_reference(x, cos, _backwards(sin) if back else sin, n_heads)
    x = x if x.stride(-1) == 1 else x.contiguous()
    c, s, y = cos.float().contiguous(), sin.float().contiguous(), x.new_empty(x.shape)
    shape = {"rows": len(x), "heads": x.shape[1], "rotated": n_heads, "width": x.shape[2], "angles": cos.shape[-1]}
    call("rotate", **shape, dtype=DTYPES[x.dtype], back=back, x=x, cos=c, sin=s, y=y)
    return y


def _turned_reference(x: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> Tensor:
    width = cos.shape[-1]
    if (n_heads, width) == tuple(x.shape[1:]):
        return _rotated(x, cos, sin)
    out = x.clone(memory_format=torch.contiguous_format)
    out[:, :n_heads, :width] = _rotated(x[:, :n_heads, :width], cos, sin)
    return out


def _backwards(sin: Tensor) -> Tensor:
    """Return the sines of the rotation backwards: those of the other half of each channel, negated."""
    return -torch.cat(sin.chunk(2, dim=-1)[::-1], dim=-1)
