"""`whet::attention` and its gradient.

It is one operator without the native library too: plain torch computes the sequences one by one, and a GPU has its
own kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake

from whet.kernels.attention.packed import BiasParts, attention_outputs, bias_of, plain
from whet.kernels.attention.packed import attention_backward as backward_of
from whet.kernels.attention.packed import attention_forward as forward_of
from whet.kernels.batch_position import KeyedPosition
from whet.kernels.native_call import native_for
from whet.kernels.specs import AttentionSpec, Drop
from whet.kernels.torch_ops.arguments import or_empty, or_none, shaped_as

NAME = "whet::attention"
_BACKWARD = "whet::attention_backward"


def _spec(
    cu_seqlens: Tensor,
    row_slots: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    max_seqlen: Tensor | None,
    kernel: str,
    key_counts: Tensor | None,
    window: int,
) -> AttentionSpec:
    n_rows = len(cu_seqlens) - 1  # a compiled block's row_slots and key_counts have one more
    counts = None if key_counts is None else key_counts[:n_rows]
    asked: Any = {"max_seqlen": max_seqlen, "kernel": kernel, "key_counts": counts}
    asked["window"] = None if window < 0 else window
    if keys is None or row_slots is None:
        return AttentionSpec(cu_seqlens, scale, causal, **asked)
    row_slots = row_slots[:n_rows]
    position = KeyedPosition(0, 0, row_slots, row_slots, cu_seqlens, row_slots, keys)
    return AttentionSpec(cu_seqlens, scale, causal, Drop(p, position, site), **asked)


def _tensors(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, ...]:
    """Return query, key and value; or the three of them joined in one tensor."""
    return (q,) if k is None or v is None else (q, k, v)


def _plain_attention(tensors: tuple[Tensor, ...], spec: AttentionSpec, bias: BiasParts) -> Tensor:
    q, k, v = tensors[0].unbind(1) if len(tensors) == 1 else tensors
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


@custom_op(NAME, mutates_args=())
def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    row_slots: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    max_seqlen: Tensor | None,
    kernel: str,
    key_counts: Tensor | None,
    window: int,
    bias: Tensor | None,
    places: Tensor | None,
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the results of `attention_forward`; without k and v, q holds all three, (N, 3, H, K)."""
    spec = _spec(cu_seqlens, row_slots, scale, causal, p, site, keys, max_seqlen, kernel, key_counts, window)
    tensors = _tensors(q, k, v)
    added = (bias, places, relative_keys, relative_queries)
    if native_for(*tensors) is None:
        out = _plain_attention(tensors, spec, added)
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)
    return forward_of(tensors, spec, added)


@register_fake(NAME)
def _(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return attention_outputs((q,) if k is None else (q, k))


@custom_op(_BACKWARD, mutates_args=())
def attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    row_slots: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    max_seqlen: Tensor | None,
    kernel: str,
    key_counts: Tensor | None,
    window: int,
    bias: Tensor | None,
    places: Tensor | None,
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the bias and relative vectors; those of k and v are empty if q holds all."""
    spec = _spec(cu_seqlens, row_slots, scale, causal, p, site, keys, max_seqlen, kernel, key_counts, window)
    tensors = _tensors(q, k, v)
    added = (bias, places, relative_keys, relative_queries)
    if native_for(*tensors) is None:
        dbias, _, dkeys, dqueries, *found = _plain_backward(dout, tensors, spec, added)
    else:
        dbias, _, dkeys, dqueries, *found = backward_of(dout, tensors, (out, lse), spec, added)
    found = [or_empty(grad, q).contiguous() for grad in (*found, None, None)[:3]]
    return found[0], found[1], found[2], or_empty(dbias, q), or_empty(dkeys, q), or_empty(dqueries, q)


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


@register_fake(_BACKWARD)
def _(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, *rest: Any) -> Any:
    bias, _, keys, queries = rest[-4:]
    found = tuple(shaped_as(one, q) for one in (q, *rest[:2]))
    return *found, *(q.new_empty(0) if one is None else one.new_empty(one.shape) for one in (bias, keys, queries))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens, row_slots, ctx.scale, ctx.causal, ctx.p, ctx.site, keys, *rest = inputs
    max_seqlen, ctx.kernel, counts, ctx.window, *bias = rest
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, cu_seqlens, row_slots, keys, max_seqlen, counts, *bias)


def _gradient(ctx: Any, dout: Tensor, _: Any) -> Any:
    *tensors, keys, max_seqlen, counts, bias, places, of_keys, of_queries = ctx.saved_tensors
    mask = (ctx.p, ctx.site, keys)
    rest = (max_seqlen, ctx.kernel, counts, ctx.window, bias, places, of_keys, of_queries)
    dq, dk, dv, *more = attention_backward(dout, *tensors, ctx.scale, ctx.causal, *mask, *rest)
    joined = tensors[3] is None
    grads = (dq, or_none(dk, wanted=not joined), or_none(dv, wanted=not joined))
    parts = zip(more, (bias, of_keys, of_queries), strict=True)
    dbias, dkeys, dqueries = (or_none(grad, wanted=one is not None) for grad, one in parts)
    return *grads, *(None,) * 11, dbias, None, dkeys, dqueries


register_autograd(NAME, _gradient, setup_context=_save)
