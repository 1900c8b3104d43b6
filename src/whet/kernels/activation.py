"""Activations: of a linear layer's output with its bias, and gated ones (GEGLU, SwiGLU)."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from whet.kernels import graph, recompute
from whet.kernels.operator import DTYPES, call, float32, floats, misfit, native_for, once_differentiable, rows_of, wide

Kind = Literal["gelu", "gelu_tanh", "silu"]
_KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}
"""The numbers of `Activation` in native/layers/activation.cpp."""


def bias_act(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """Return act(x + bias) of x (..., F). Backward needs x, and computes the bias gradient in the same pass."""
    if graph.holds(x):
        return torch.ops.whet.bias_act(x, bias, _KINDS[kind])
    if native_for(x) is None:
        return bias_act_reference(x, bias, kind)
    y, kept = _BiasAct.apply(x, bias, _KINDS[kind]), x.detach()
    recompute.register(y, lambda: _BiasAct.apply(kept, bias, _KINDS[kind]))
    return y


def gated_act(gate: Tensor, up: Tensor, kind: Kind) -> Tensor:
    """Return act(gate) * up (SwiGLU with kind silu)."""
    if native_for(gate, up) is None:
        return gated_act_reference(gate, up, kind)
    return _GatedAct.apply(_KINDS[kind], gate, up).view(gate.shape)


def gated_act_joined(x: Tensor, kind: Kind) -> Tensor:
    """Return act(gate) * up for x (..., 2 F), which holds gate and up side by side. The gradient is one tensor too."""
    if native_for(x) is None:
        gate, up = x.chunk(2, dim=-1)
        return gated_act_reference(gate, up, kind)
    return _GatedAct.apply(_KINDS[kind], x).view(*x.shape[:-1], -1)


def bias_act_reference(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """Return `bias_act` in plain torch, also in float64."""
    return _activated(wide(x) if bias is None else wide(x) + wide(bias), kind).to(x.dtype)


def gated_act_reference(gate: Tensor, up: Tensor, kind: Kind) -> Tensor:
    """Return `gated_act` in plain torch, also in float64; with kind silu this is SwiGLU (Shazeer 2020)."""
    return (_activated(wide(gate), kind) * wide(up)).to(gate.dtype)


def _activated(x: Tensor, kind: Kind) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def bias_act_forward(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """Return act(x + bias). `kind` is a number of `_KINDS`."""
    x = x.contiguous()
    y, b = torch.empty_like(x), float32(bias)
    rows, width = rows_of(x)
    if b is not None and b.numel() != width:
        raise misfit("bias_act", x, b)
    call("bias_act", rows=rows, width=width, dtype=DTYPES[x.dtype], kind=kind, x=x, bias=b, y=y)
    return y


def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the bias."""
    x, dy, b = x.contiguous(), dy.contiguous(), float32(bias)
    rows, width = rows_of(x)
    dx, dbias = torch.empty_like(x), None if bias is None else floats(width)
    how = {"dtype": DTYPES[x.dtype], "kind": kind}
    call("bias_act_backward", rows=rows, width=width, **how, x=x, bias=b, dy=dy, dx=dx, dbias=dbias)
    return dx, None if bias is None or dbias is None else dbias.to(bias.dtype)


def gated_act_forward(tensors: tuple[Tensor, ...], kind: int) -> Tensor:
    """Return act(gate) * up (rows, F) of gate and up, or of one tensor that holds both side by side."""
    gate, up = _halves(tensors)
    if gate.shape != up.shape:
        raise misfit("gated_act", gate, up)
    y = gate.new_empty(gate.shape)
    call("gated_act", **_shape(gate, kind), gate=gate, up=up, y=y)
    return y


def gated_act_backward(dy: Tensor, tensors: tuple[Tensor, ...], kind: int) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors, one or two."""
    (gate, up), dy = _halves(tensors), dy.contiguous()
    found = tuple(t.new_empty(t.shape) for t in tensors)
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *gated_act_backward(grads[0], ctx.saved_tensors, ctx.kind)


def _shape(gate: Tensor, kind: int) -> dict[str, int]:
    rows, width = rows_of(gate)
    return {"rows": rows, "width": width, "in_stride": gate.stride(-2), "dtype": DTYPES[gate.dtype], "kind": kind}


def _halves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return gate and up as evenly spaced rows: two tensors, or the halves of one."""
    if len(tensors) == 1:
        gate, up = tensors[0].contiguous().flatten(0, -2).chunk(2, dim=-1)
        return gate, up
    return tensors[0].contiguous().flatten(0, -2), tensors[1].contiguous().flatten(0, -2)


def _bias_act_in_graph(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    return bias_act_forward(x, bias, kind)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _gradient(ctx: Any, dy: Tensor) -> Any:
    x, bias = ctx.saved_tensors
    dx, dbias = torch.ops.whet.bias_act_backward(dy, x, bias, ctx.kind)
    return dx, graph.or_none(dbias, wanted=bias is not None), None


def _bias_act_backward_in_graph(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    dx, dbias = bias_act_backward(dy, x, bias, kind)
    return dx, graph.or_empty(dbias, x)


def _fake_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    return graph.shaped_as(x, x), graph.shaped_as(bias, x)


graph.operator("bias_act", _bias_act_in_graph, lambda x, *rest: x.new_empty(x.shape), save=_save, gradient=_gradient)
graph.operator("bias_act_backward", _bias_act_backward_in_graph, _fake_backward)
