"""Dropout, normalisation and activations as native operators with their gradients.

Each one runs `reference` where the native library is absent or does not take the tensors (another
device or dtype). Masks and all results are the same for any number of threads.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph, structs
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.layers import recompute
from whet.kernels.native_call import DTYPES, call, float32, mask_of, native_for, ptr, rows_of
from whet.kernels.reference import layers as reference
from whet.kernels.specs import Drop, Kind, Norm

_Args = TypeVar("_Args", bound=ctypes.Structure)
_KINDS = {"gelu": structs.GELU_ERF, "gelu_tanh": structs.GELU_TANH, "silu": structs.SILU}


def dropout(x: Tensor, drop: Drop) -> Tensor:
    """Return x (..., D) with channels dropped and the kept ones scaled by 1 / (1 - p); no mask is stored."""
    if graph.holds(x, drop=drop):
        return torch.ops.whet.dropout(x, *graph.mask_arguments(drop))
    if native_for(x) is None:
        return reference.dropout(x, drop)
    return _Dropout.apply(x, drop)


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, *, linear_bias: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalised(s), s) with s = residual + dropout(x + linear_bias): one pass each way.

    `linear_bias` is the bias of the product that made x, left out there. Blocks that normalise first read both results,
    blocks that normalise last only the first. Keeps s and two numbers a row for backward.
    """
    if residual is not None and graph.holds(x, residual, drop=drop):
        parts = (x, residual, linear_bias, norm.weight, norm.bias, norm.eps, norm.rms)
        return torch.ops.whet.add_norm(*parts, *graph.mask_arguments(drop))[:2]
    if native_for(x, residual) is None:
        return reference.add_norm(x, residual, norm, linear_bias=linear_bias, drop=drop)
    drop = None if drop is not None and drop.p == 0.0 else drop
    y, total = _AddNorm.apply(x, residual, linear_bias, norm.weight, norm.bias, _NormSpec(norm.eps, norm.rms, drop))
    total = x if total is None else total
    kept, again = total.detach(), (norm.weight, norm.bias, _NormSpec(norm.eps, norm.rms, None))
    recompute.register(y, lambda: _AddNorm.apply(kept, None, None, *again)[0])
    return y, total


def bias_act(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """Return act(x + bias) of x (..., F); backward makes the bias gradient in the same pass. Keeps x."""
    if graph.holds(x):
        return torch.ops.whet.bias_act(x, bias, _KINDS[kind])
    if native_for(x) is None:
        return reference.bias_act(x, bias, kind)
    y, kept = _BiasAct.apply(x, bias, _KINDS[kind]), x.detach()
    recompute.register(y, lambda: _BiasAct.apply(kept, bias, _KINDS[kind]))
    return y


def gated_act(gate: Tensor, up: Tensor, kind: Kind) -> Tensor:
    """Return act(gate) * up (SwiGLU with kind silu)."""
    if native_for(gate, up) is None:
        return reference.gated_act(gate, up, kind)
    return _GatedAct.apply(_KINDS[kind], gate, up).view(gate.shape)


def gated_act_joined(x: Tensor, kind: Kind) -> Tensor:
    """Return act(gate) * up for x (..., 2 F) that holds gate and up side by side; its gradient is one tensor, too."""
    if native_for(x) is None:
        gate, up = x.chunk(2, dim=-1)
        return reference.gated_act(gate, up, kind)
    return _GatedAct.apply(_KINDS[kind], x).view(*x.shape[:-1], -1)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: Drop) -> Tensor:
        ctx.drop = drop
        return _masked(x, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _masked(grads[0], ctx.drop), None


def _masked(x: Tensor, drop: Drop) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = rows_of(x)
    call("dropout", structs.Dropout(rows, x.shape[-1], DTYPES[x.dtype], 0, mask_of(drop, rows), ptr(x), ptr(y)))
    return y


@dataclass(frozen=True)
class _NormSpec:
    eps: float
    rms: bool
    drop: Drop | None


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, linear_bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias, spec = rest
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        rows, plain = rows_of(x), residual is None and linear_bias is None and spec.drop is None
        total, y = None if plain else torch.empty_like(x), torch.empty_like(x)
        mean, rstd = _floats(2, rows).unbind()
        w, b, lb = float32(weight), float32(bias), float32(linear_bias)
        args = structs.AddNorm(rows, x.shape[-1], DTYPES[x.dtype], spec.rms, spec.eps, 0, mask_of(spec.drop, rows))
        _point(args, x=x, residual=residual, linear_bias=lb, weight=w, bias=b, sum=total, y=y, mean=mean, rstd=rstd)
        call("add_norm", args)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.params = (None if linear_bias is None else linear_bias.dtype, bias is not None)
        ctx.save_for_backward(x if total is None else total, mean, rstd, weight)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, mean, rstd, weight = ctx.saved_tensors
        linear_dtype, has_bias = ctx.params
        width, rows = total.shape[-1], rows_of(total)
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dsum_in = None if dsum_in is None else dsum_in.contiguous()
        dsum = torch.empty_like(total)
        dx = dsum if ctx.spec.drop is None else torch.empty_like(total)
        dweight, w = _floats(width), float32(weight)
        dbias = _floats(width) if has_bias else None
        dlinear = _floats(width) if linear_dtype else None
        args = structs.AddNormBackward(rows, width, DTYPES[total.dtype], ctx.spec.rms, mask_of(ctx.spec.drop, rows))
        _point(args, dy=dy, dsum_in=dsum_in, sum=total, mean=mean, rstd=rstd, weight=w, dsum=dsum)
        _point(args, dx=None if dx is dsum else dx, dweight=dweight, dbias=dbias, dlinear_bias=dlinear)
        call("add_norm_backward", args)
        residual_grad = dsum if ctx.needs_input_grad[1] else None
        dbias = None if dbias is None else dbias.to(weight.dtype)
        dlinear = None if dlinear is None else dlinear.to(linear_dtype)
        return dx, residual_grad, dlinear, dweight.to(weight.dtype), dbias, None


class _BiasAct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        x = x.contiguous()
        y, b = torch.empty_like(x), float32(bias)
        args = structs.BiasAct(rows_of(x), x.shape[-1], DTYPES[x.dtype], kind)
        call("bias_act", _point(args, x=x, bias=b, y=y))
        ctx.kind = kind
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, bias = ctx.saved_tensors
        dy, dx, b = grads[0].contiguous(), torch.empty_like(x), float32(bias)
        dbias = None if bias is None else _floats(x.shape[-1])
        args = structs.BiasAct(rows_of(x), x.shape[-1], DTYPES[x.dtype], ctx.kind)
        call("bias_act_backward", _point(args, x=x, bias=b, dy=dy, dx=dx, dbias=dbias))
        return dx, None if bias is None or dbias is None else dbias.to(bias.dtype), None


class _GatedAct(Function):
    @staticmethod
    def forward(ctx: Any, kind: int, *tensors: Tensor) -> Tensor:
        gate, up = _halves(tensors)
        y = torch.empty(gate.shape, dtype=gate.dtype)
        args = structs.GatedAct(rows_of(gate), gate.shape[-1], DTYPES[gate.dtype], kind, in_stride=gate.stride(-2))
        call("gated_act", _point(args, gate=gate, up=up, y=y))
        ctx.kind = kind
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = _halves(ctx.saved_tensors)
        dy, width = grads[0].contiguous(), gate.shape[-1]
        found = tuple(torch.empty(t.shape, dtype=t.dtype) for t in ctx.saved_tensors)
        dgate, dup = _halves(found)
        args = structs.GatedAct(rows_of(gate), width, DTYPES[gate.dtype], ctx.kind, in_stride=gate.stride(-2))
        args.grad_stride = dgate.stride(-2)
        call("gated_act_backward", _point(args, gate=gate, up=up, dy=dy, dgate=dgate, dup=dup))
        return None, *found


def _halves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return gate and up as evenly spaced rows: two tensors, or the halves of one."""
    if len(tensors) == 1:
        gate, up = tensors[0].contiguous().flatten(0, -2).chunk(2, dim=-1)
        return gate, up
    return tensors[0].contiguous().flatten(0, -2), tensors[1].contiguous().flatten(0, -2)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _point(args: _Args, **tensors: Tensor | None) -> _Args:
    """Set the pointers of args to the tensors' data; the caller keeps the tensors."""
    for name, tensor in tensors.items():
        setattr(args, name, ptr(tensor))
    return args
