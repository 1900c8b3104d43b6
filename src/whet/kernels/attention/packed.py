"""Attention within packed sequences, and its gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph, structs
from whet.kernels.attention import gpu as gpu_attention
from whet.kernels.first_derivative import once_differentiable
from whet.kernels.native_call import DTYPES, call, native_for, ptr
from whet.kernels.random import keep_threshold
from whet.kernels.reference import layers as reference
from whet.kernels.specs import AttentionSpec


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each sequence; k and v (N, G, K) may have fewer heads.

    `bias` (H, 2 R + 1) is b by distance: bias[h, j - i + R] for key j and query i. No sequence is longer than R + 1.
    The tensors may be views whose last dimension is contiguous. Backward recomputes the weights from one number per
    query and head, and the dropout mask from its key. Working memory is linear in the longest sequence.
    """
    if graph.in_graph(spec.drop):
        return _in_graph(spec, q, k, v, bias)
    if native_for(q, k, v) is None:
        return plain(q, k, v, spec, bias)
    return _Attend.apply(spec, _as_read(bias), q, k, v)


def attend_joined(qkv: Tensor, spec: AttentionSpec, bias: Tensor | None = None) -> Tensor:
    """Return the attention (N, H, K) of qkv (N, 3, H, K), the product of the three joined projections.

    It is read in place, and its gradient is one tensor, which the product's backward takes. `bias`: see `attend`.
    """
    if graph.in_graph(spec.drop):
        return _in_graph(spec, qkv, None, None, bias)
    if native_for(qkv) is None:
        q, k, v = qkv.unbind(1)
        return plain(q, k, v, spec, bias)
    return _Attend.apply(spec, _as_read(bias), qkv)


def plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Tensor | None = None) -> Tensor:
    """Return what `attend` computes without the native operator: in a GPU's kernels, or by the textbook row by row."""
    on_gpu = q.device.type != "cpu" and not torch.compiler.is_compiling()
    return (gpu_attention if on_gpu else reference).attend(q, k, v, spec, bias)


def _in_graph(spec: AttentionSpec, q: Tensor, k: Tensor | None, v: Tensor | None, bias: Tensor | None) -> Tensor:
    row_slots = None if spec.drop is None else spec.drop.position.row_slots
    p, site, keys, _, _ = graph.mask_arguments(spec.drop)
    rows = (spec.cu_seqlens, row_slots, spec.scale, spec.causal)
    which = (spec.max_seqlen, spec.kernel, spec.key_counts, -1 if spec.window is None else spec.window)
    return torch.ops.whet.attention(q, k, v, *rows, p, site, keys, *which, _as_read(bias))[0]


def attention_forward(
    tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, K), and the log-sum-exp of the scores (N, H) fp32, which backward needs.

    `tensors` are query, key and value, or one tensor (N, 3, H, K) that holds them.
    """
    q, k, v = _split(with_contiguous_heads(tensors))
    out, lse = attention_outputs(tensors)
    args = _arguments(spec, (q, k, v), out, lse)
    _add_bias(args, bias)
    call("attention", args)
    return out, lse


def attention_backward(
    dout: Tensor,
    tensors: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    bias: Tensor | None = None,
    *,
    of_bias: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the bias, if there is one and `of_bias`, and of the tensors, contiguous.

    `dout` is the gradient of the attention; `results` are those of `attention_forward`.
    """
    tensors, (dout,) = with_contiguous_heads(tensors), with_contiguous_heads((dout,))
    found = tuple(torch.empty(t.shape, dtype=t.dtype) for t in tensors)
    args = _arguments(spec, _split(tensors), *results)
    args.dout = _view(dout)
    args.dq, args.dk, args.dv = (_view(grad) for grad in _split(found))
    _add_bias(args, bias)
    if bias is None or not of_bias:
        call("attention_backward", args)
        return None, *found
    dbias, by_row = torch.empty_like(bias), bias.new_empty(2 * len(dout), len(bias))
    args.dbias, args.dbias_rows = ptr(dbias), ptr(by_row)
    call("attention_backward", args)
    return dbias, *found


def attention_outputs(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return new tensors for the results of `attention_forward`, not yet written."""
    q = tensors[0]
    out = q.new_empty(q.shape if len(tensors) > 1 else (q.shape[0], *q.shape[2:]))
    return out, q.new_empty(out.shape[:2], dtype=torch.float32)


def with_contiguous_heads(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors as the operator reads them: with a contiguous last dimension; views stay views."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _as_read(bias: Tensor | None) -> Tensor | None:
    """Return the bias as the operator reads it."""
    return None if bias is None else bias.float().contiguous()


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, spec: AttentionSpec, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        tensors = with_contiguous_heads(tensors)
        out, lse = attention_forward(tensors, spec, bias)
        ctx.spec = spec
        ctx.save_for_backward(*tensors, out, lse, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, out, lse, bias = ctx.saved_tensors
        results, of_bias = (out, lse), ctx.needs_input_grad[1]
        return None, *attention_backward(grads[0], tuple(tensors), results, ctx.spec, bias, of_bias=of_bias)


def _split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors[0].unbind(1) if len(tensors) == 1 else tensors
    return q, k, v


def _view(x: Tensor) -> structs.View:
    return structs.View(ptr(x), x.stride(0), x.stride(1))


def _arguments(spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor) -> structs.Attention:
    q, k, v = qkv
    assert spec.cu_seqlens.dtype == torch.int32
    assert spec.cu_seqlens.is_contiguous()
    args = structs.Attention(spec.cu_seqlens.numel() - 1, q.shape[1], k.shape[1], q.shape[2], DTYPES[q.dtype])
    args.causal, args.scale, args.keep_scale = spec.causal, spec.scale, 1.0
    args.cu_seqlens, args.lse = ptr(spec.cu_seqlens), ptr(lse)
    args.window = -1 if spec.window is None else spec.window
    if spec.key_counts is not None:
        assert spec.key_counts.dtype == torch.int32
        assert not spec.causal
        args.key_counts = ptr(spec.key_counts)
    args.q, args.k, args.v, args.out = (_view(tensor) for tensor in (q, k, v, out))
    drop = spec.drop
    if drop is not None and drop.p > 0.0:
        assert drop.position.row_slots.dtype == torch.int32
        low, high = drop.key
        args.key, args.threshold, args.keep_scale = low | high << 32, keep_threshold(drop.p), drop.keep_scale
        args.row_slots = ptr(drop.position.row_slots)
    return args


def _add_bias(args: structs.Attention, bias: Tensor | None) -> None:
    if bias is None:
        return
    assert bias.dtype == torch.float32
    assert bias.is_contiguous()
    assert bias.shape[0] == args.heads
    args.bias, args.reach = ptr(bias), bias.shape[1] // 2
