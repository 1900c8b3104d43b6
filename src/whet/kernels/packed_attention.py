"""Attention within packed sequences, and its gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from whet.kernels import graph
from whet.kernels.attention_spec import AttentionSpec, Bias, Relative, attend_reference
from whet.kernels.batch_position import Drop, KeyedPosition
from whet.kernels.dropout import mask_arguments
from whet.kernels.operator import DTYPES, call, has_rows, misfit, native_for, once_differentiable
from whet.kernels.random import keep_threshold

BiasParts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""A bias as tensors: numbers by distance; places, keys and queries of a `Relative`."""
NO_BIAS: BiasParts = (None, None, None, None)


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each sequence; k and v (N, G, K) may have fewer heads.

    `bias` (H, 2 R + 1) is b by distance: bias[h, j - i + R] for key j and query i. No sequence is longer than R + 1.
    A `Relative` computes b from vectors by distance, also without a (T, T) tensor; all heads then have own keys.
    The tensors may be views whose last dimension is contiguous. Backward recomputes the weights from one number per
    query and head, and the dropout mask from its key. Working memory is linear in the longest sequence.
    """
    if graph.in_graph(spec.drop):
        return _by_operator(spec, q, k, v, bias)
    if native_for(q, k, v) is None:
        return plain(q, k, v, spec, bias)
    return _Attend.apply(spec, *bias_parts(bias, q), q, k, v)


def attend_joined(qkv: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return the attention (N, H, K) of qkv (N, 3, H, K), the product of the three joined projections.

    It is read in place, and its gradient is one tensor, which the product's backward takes. `bias`: see `attend`.
    """
    if graph.in_graph(spec.drop):
        return _by_operator(spec, qkv, None, None, bias)
    if native_for(qkv) is None:
        q, k, v = qkv.unbind(1)
        return plain(q, k, v, spec, bias)
    return _Attend.apply(spec, *bias_parts(bias, qkv), qkv)


def plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return what `attend` computes without the native operator: in a GPU's kernels, or by the textbook row by row."""
    if q.device.type == "cpu" or torch.compiler.is_compiling():
        return attend_reference(q, k, v, spec, bias)
    from whet.kernels import gpu_attention

    return gpu_attention.attend(q, k, v, spec, bias)


def _by_operator(spec: AttentionSpec, q: Tensor, k: Tensor | None, v: Tensor | None, bias: Bias | None) -> Tensor:
    row_slots = None if spec.drop is None else spec.drop.position.row_slots
    p, site, keys, _, _ = mask_arguments(spec.drop)
    rows = (spec.cu_seqlens, row_slots, spec.scale, spec.causal)
    which = (spec.max_seqlen, spec.kernel, spec.key_counts, -1 if spec.window is None else spec.window)
    return torch.ops.whet.attention(q, k, v, *rows, p, site, keys, *which, *bias_parts(bias, q))[0]


def attention_forward(
    tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: BiasParts = NO_BIAS
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, K), and the log-sum-exp of the scores (N, H) fp32, which backward needs.

    `tensors` are query, key and value, or one tensor (N, 3, H, K) that holds them.
    """
    q, k, v = _split(with_contiguous_heads(tensors))
    out, lse = attention_outputs(tensors)
    call("attention", **_arguments(spec, (q, k, v), out, lse), **_bias_arguments(bias, spec, q, k))
    return out, lse


def attention_backward(
    dout: Tensor,
    tensors: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    bias: BiasParts = NO_BIAS,
    *,
    of_bias: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the four parts of the bias, of numbers only if `of_bias`, and of the tensors, contiguous.

    `dout` is the gradient of the attention; `results` are those of `attention_forward`.
    """
    *given, dout = with_contiguous_heads((*tensors, dout))
    tensors = tuple(given)
    found = tuple([t.new_empty(t.shape) for t in tensors])
    q, k, v = _split(tensors)
    dq, dk, dv = _split(found)
    if dout.shape != results[0].shape:
        raise misfit("attention_backward", dout, results[0])
    args = _arguments(spec, (q, k, v), *results) | _bias_arguments(bias, spec, q, k)
    numbers, places, keys, queries = bias
    dbias, *more = [None if part is None else part.new_empty(part.shape) for part in (numbers, keys, queries)]
    if places is not None:
        args |= {"drelative_keys": more[0], "drelative_queries": more[1]}
    if dbias is not None and of_bias:
        args |= {"dbias": dbias, "dbias_rows": dbias.new_empty(2 * len(dout), len(dbias))}
    call("attention_backward", **args, dout=dout, dq=dq, dk=dk, dv=dv)
    return dbias if of_bias else None, None, *more, *found


def attention_outputs(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return new tensors for the results of `attention_forward`, not yet written."""
    q = tensors[0]
    out = q.new_empty(q.shape if len(tensors) > 1 else (q.shape[0], *q.shape[2:]))
    return out, q.new_empty(out.shape[:2], dtype=torch.float32)


def with_contiguous_heads(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors as the operator reads them: with a contiguous last dimension; views stay views."""
    return tuple([t if t.stride(-1) == 1 else t.contiguous() for t in tensors])


def bias_parts(bias: Bias | None, q: Tensor) -> BiasParts:
    """Return the parts of a bias as the operator reads them, next to these queries."""
    if bias is None:
        return NO_BIAS
    if isinstance(bias, Tensor):
        return bias.float().contiguous(), None, None, None
    keys, queries = (None if part is None else part.to(q.dtype) for part in (bias.keys, bias.queries))
    return None, bias.places, keys, queries


def bias_of(parts: BiasParts) -> Bias | None:
    """Return the bias that `bias_parts` took apart."""
    numbers, places, keys, queries = parts
    return numbers if places is None else Relative(keys, queries, places)


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, spec: AttentionSpec, *given: Any) -> Tensor:
        bias, tensors = given[:4], given[4:]
        out, lse = attention_forward(tensors, spec, bias)
        ctx.spec = spec
        ctx.save_for_backward(*tensors, out, lse, *bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *tensors, out, lse, numbers, places, keys, queries = ctx.saved_tensors
        bias, of_bias = (numbers, places, keys, queries), ctx.needs_input_grad[1]
        return None, *attention_backward(grads[0], tuple(tensors), (out, lse), ctx.spec, bias, of_bias=of_bias)


def _split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors[0].unbind(1) if len(tensors) == 1 else tensors
    return q, k, v


def _arguments(spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor) -> dict[str, Any]:
    q, k, v = qkv
    _require_fit(spec, qkv, out, lse)
    assert spec.cu_seqlens.dtype == torch.int32
    assert spec.cu_seqlens.is_contiguous()
    if spec.key_counts is not None:
        assert spec.key_counts.dtype == torch.int32
        assert not spec.causal
    _, heads, width = q.shape
    args = {
        "n_rows": spec.cu_seqlens.numel() - 1,
        "heads": heads,
        "key_heads": k.shape[1],
        "head_width": width,
        "dtype": DTYPES[q.dtype],
        "causal": spec.causal,
        "scale": spec.scale,
        "keep_scale": 1.0,
        "window": -1 if spec.window is None else spec.window,
        "cu_seqlens": spec.cu_seqlens,
        "key_counts": spec.key_counts,
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
    }
    drop = spec.drop
    if drop is not None and drop.p > 0.0:
        assert drop.position.row_slots.dtype == torch.int32
        low, high = drop.key
        args["key"], args["threshold"], args["keep_scale"] = low | high << 32, keep_threshold(drop.p), drop.keep_scale
        args["row_slots"] = drop.position.row_slots
    return args


def _require_fit(spec: AttentionSpec, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> None:
    """Raise ValueError if a tensor has other tokens, rows or heads than the queries: nothing is computed then."""
    q, k, v = qkv
    n_tokens, heads, width = queries = q.shape
    n_keys, key_heads, key_width = keys = k.shape
    n_rows = spec.cu_seqlens.numel() - 1
    fits = out.shape == queries and lse.shape == (n_tokens, heads) and v.shape == keys
    fits = fits and (n_keys, key_width) == (n_tokens, width) and heads % max(key_heads, 1) == 0
    if not fits:
        raise misfit("attention", q, k, v, out, lse)
    if not has_rows(spec.cu_seqlens, n_tokens):
        raise misfit("attention", q, spec.cu_seqlens)
    if (counts := spec.key_counts) is not None:
        fits = counts.numel() == n_rows and counts.is_contiguous()
        if not (fits and bool(((counts >= 0) & (counts <= spec.cu_seqlens.diff())).all())):
            raise misfit("attention", counts, spec.cu_seqlens)
    if spec.drop is not None:
        slots = spec.drop.position.row_slots
        if slots.numel() < n_rows or not slots.is_contiguous():
            raise misfit("attention", slots, spec.cu_seqlens)


def _bias_arguments(bias: BiasParts, spec: AttentionSpec, q: Tensor, k: Tensor) -> dict[str, Any]:
    numbers, places, keys, queries = bias
    if numbers is not None:
        assert numbers.dtype == torch.float32
        assert numbers.is_contiguous()
        assert numbers.shape[0] == q.shape[1]
        _require_reach(numbers.shape[1], numbers, spec)
        return {"bias": numbers, "reach": numbers.shape[1] // 2}
    if places is None:
        return {}
    assert places.dtype == torch.int32
    assert places.is_contiguous()
    assert q.shape[1] == k.shape[1]
    tables = [part for part in (keys, queries) if part is not None]
    assert all(part.stride(-1) == 1 and part.shape[1:] == q.shape[1:] for part in tables)
    n_places = len(tables[0]) if tables else 0
    inside = bool(((places >= 0) & (places < n_places)).all()) or not tables
    if not (inside and all(len(part) == n_places for part in tables)):
        raise misfit("attention", places, keys, queries)
    _require_reach(len(places), places, spec)
    relative = {"relative_keys": keys, "relative_queries": queries}
    return {"places": places, "reach": len(places) // 2, "n_places": n_places} | relative


def _require_reach(n_distances: int, by_distance: Tensor, spec: AttentionSpec) -> None:
    """Raise ValueError if two tokens of a row are further apart than the distances (2 R + 1) go."""
    longest = int(spec.cu_seqlens.diff().max()) if spec.cu_seqlens.numel() > 1 else 0
    if n_distances % 2 == 0 or longest > n_distances // 2 + 1:
        raise misfit("attention", by_distance, spec.cu_seqlens)


_GIVEN = (
    "Tensor q, Tensor? k, Tensor? v, Tensor cu_seqlens, Tensor? row_slots, float scale, bool causal, float p, "
    "SymInt site, Tensor? keys, Tensor? max_seqlen, str kernel, Tensor? key_counts, SymInt window, Tensor? bias, "
    "Tensor? places, Tensor? relative_keys, Tensor? relative_queries"
)
"""What attention gets in a graph; without k and v, q holds all three, (N, 3, H, K)."""


def _settings_of(
    q: Tensor, k: Any, v: Any, cu_seqlens: Tensor, row_slots: Any, scale: float, causal: bool, p: float, site: int,
    keys: Any, max_seqlen: Any, kernel: Any, key_counts: Any, window: int, *bias: Any,
) -> tuple[tuple[Tensor, ...], AttentionSpec, BiasParts]:  # fmt: skip
    """Return the tensors, the settings and the parts of the bias that `_GIVEN` stands for."""
    n_rows = len(cu_seqlens) - 1  # a compiled block's row_slots and key_counts have one more
    drop = None
    if keys is not None and row_slots is not None:
        row_slots = row_slots[:n_rows]
        drop = Drop(p, KeyedPosition(0, 0, row_slots, row_slots, cu_seqlens, row_slots, keys), site)
    counts, reach = None if key_counts is None else key_counts[:n_rows], None if window < 0 else window
    spec = AttentionSpec(cu_seqlens, scale, causal, drop, max_seqlen, kernel, counts, reach)
    return (q,) if k is None else (q, k, v), spec, (bias[0], bias[1], bias[2], bias[3])


def _attention_in_graph(*given: Any) -> tuple[Tensor, Tensor]:
    """Return the results of `attention_forward`."""
    tensors, spec, bias = _settings_of(*given)
    if native_for(*tensors) is None:
        out = _plain_attention(tensors, spec, bias)
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)
    return attention_forward(tensors, spec, bias)


def _attention_backward_in_graph(dout: Tensor, out: Tensor, lse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the bias and relative vectors; those of k and v are empty if q holds all."""
    tensors, spec, bias = _settings_of(*given)
    if native_for(*tensors) is None:
        dbias, _, dkeys, dqueries, *found = _plain_backward(dout, tensors, spec, bias)
    else:
        dbias, _, dkeys, dqueries, *found = attention_backward(dout, tensors, (out, lse), spec, bias)
    q = tensors[0]
    dq, dk, dv = (graph.or_empty(grad, q).contiguous() for grad in (*found, None, None)[:3])
    return dq, dk, dv, *(graph.or_empty(grad, q) for grad in (dbias, dkeys, dqueries))


def _plain_backward(
    dout: Tensor, tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: BiasParts
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the four parts of the bias, those that exist, and of the tensors."""
    with _autograd():
        again = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        own = [None if part is None else part.detach() for part in bias]
        trained = [part.requires_grad_() for part in own if part is not None and part.is_floating_point()]
        out = _plain_attention(again, spec, (own[0], own[1], own[2], own[3]))
        found = iter(torch.autograd.grad(out, (*trained, *again), dout))
    return *(next(found) if part is not None and part.requires_grad else None for part in own), *found


def _fake_backward(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, *rest: Any) -> Any:
    k, v, *_, bias, _, keys, queries = rest
    return tuple(graph.shaped_as(one, q) for one in (q, k, v, bias, keys, queries))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens, row_slots, ctx.scale, ctx.causal, ctx.p, ctx.site, keys, *rest = inputs
    max_seqlen, ctx.kernel, counts, ctx.window, *bias = rest
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, cu_seqlens, row_slots, keys, max_seqlen, counts, *bias)


def _gradient(ctx: Any, dout: Tensor, _: Any) -> Any:
    *tensors, keys, max_seqlen, counts, bias, places, of_keys, of_queries = ctx.saved_tensors
    mask = (ctx.p, ctx.site, keys)
    rest = (max_seqlen, ctx.kernel, counts, ctx.window, bias, places, of_keys, of_queries)
    dq, dk, dv, *more = torch.ops.whet.attention_backward(dout, *tensors, ctx.scale, ctx.causal, *mask, *rest)
    joined = tensors[3] is None
    grads = (dq, graph.or_none(dk, wanted=not joined), graph.or_none(dv, wanted=not joined))
    parts = zip(more, (bias, of_keys, of_queries), strict=True)
    dbias, dkeys, dqueries = (graph.or_none(grad, wanted=one is not None) for grad, one in parts)
    return *grads, *(None,) * 11, dbias, None, dkeys, dqueries


def _plain_attention(tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: BiasParts) -> Tensor:
    q, k, v = _split(tensors)
    # As the graph expects it: flash kernels keep the strides of q, and autocast changes the dtype.
    return plain(q, k, v, spec, bias_of(bias)).to(q.dtype).contiguous()


@contextmanager
def _autograd() -> Iterator[None]:
    """Run the block with autograd, which torch turns off inside an operator."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


def _fake(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return attention_outputs((q,) if k is None else (q, k))


graph.operator(
    "attention", _attention_in_graph, _fake, schema=f"({_GIVEN}) -> (Tensor, Tensor)", save=_save, gradient=_gradient
)
graph.operator(
    "attention_backward",
    _attention_backward_in_graph,
    _fake_backward,
    schema=f"(Tensor dout, Tensor out, Tensor lse, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
