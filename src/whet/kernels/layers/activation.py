"""Activations: of a linear layer's output with its bias, and gated ones (GEGLU, SwiGLU)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.layers import recompute
from whet.kernels.native_call import DTYPES, call, float32, floats, native_for, require, rows_of
from whet.kernels.reference import layers as reference
from whet.kernels.specs import Kind

_KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}
"""The numbers of `Activation` in native/layers/activation.cpp."""


def bias_act(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """Return act(x + bias) of x (..., F). Backward needs x, and computes the bias gradient in the same pass."""
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
    """Return act(gate) * up for x (..., 2 F), which holds gate and up side by side. The gradient is one tensor too."""
    if native_for(x) is None:
        gate, up = x.chunk(2, dim=-1)
        return reference.gated_act(gate, up, kind)
    return _GatedAct.apply(_KINDS[kind], x).view(*x.shape[:-1], -1)


def bias_act_forward(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """Return act(x + bias). `kind` is a number of `_KINDS`."""
    x = x.contiguous()
    y, b = torch.empty_like(x), float32(bias)
    require(b is None or b.numel() == x.shape[-1], "bias_act", x, b)
    call("bias_act", rows=rows_of(x), width=x.shape[-1], dtype=DTYPES[x.dtype], kind=kind, x=x, bias=b, y=y)
    return y


def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the bias."""
    x, dy, b = x.contiguous(), dy.contiguous(), float32(bias)
    dx, dbias = torch.empty_like(x), None if bias is None else floats(x.shape[-1])
    shape = {"rows": rows_of(x), "width": x.shape[-1], "dtype": DTYPES[x.dtype], "kind": kind}
    call("bias_act_backward", **shape, x=x, bias=b, dy=dy, dx=dx, dbias=dbias)
    return dx, None if bias is None or dbias is None else dbias.to(bias.dtype)


def gated_act_forward(tensors: tuple[Tensor, ...], kind: int) -> Tensor:
    """Return act(gate) * up (rows, F) of gate and up, or of one tensor that holds both side by side."""
    gate, up = _halves(tensors)
    require(gate.shape == up.shape, "gated_act", gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    call("gated_act", **_shape(gate, kind), gate=gate, up=up, y=y)
    return y


def gated_act_backward(dy: Tensor, tensors: tuple[Tensor, ...], kind: int) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors, one or two."""
    (gate, up), dy = _halves(tensors), dy.contiguous()
    found = tuple(torch.empty(t.shape, dtype=t.dtype) for t in tensors)
    dgate, dup = _halves(found)
    gradients = {"dgate": dgate, "dup": dup, "grad_stride": dgate.stride(-2)}
    call("gated_act_backward", **_shape(gate, kind), gate=gate, up=up, dy=dy, **gradients)
    return found


class _BiasAct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        x = x.contiguous()
        ctx.kind = kind
        ctx.save_for_backward(x, bias)
        return bias_act_forward(x, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, bias = ctx.saved_tensors
        return *bias_act_backward(grads[0], x, bias, ctx.kind), None


class _GatedAct(Function):
    @staticmethod
    def forward(ctx: Any, kind: int, *tensors: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(*tensors)
        return gated_act_forward(tensors, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *gated_act_backward(grads[0], ctx.saved_tensors, ctx.kind)


def _shape(gate: Tensor, kind: int) -> dict[str, int]:
    rows = {"rows": rows_of(gate), "width": gate.shape[-1], "in_stride": gate.stride(-2)}
    return rows | {"dtype": DTYPES[gate.dtype], "kind": kind}


def _halves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return gate and up as evenly spaced rows: two tensors, or the halves of one."""
    if len(tensors) == 1:
        gate, up = tensors[0].contiguous().flatten(0, -2).chunk(2, dim=-1)
        return gate, up
    return tensors[0].contiguous().flatten(0, -2), tensors[1].contiguous().flatten(0, -2)
