"""The native operators as operators of torch: a compiler keeps them in its graph without looking inside.

Each runs the code of `layers/fused.py` or `attention/packed.py`; here are only its shapes and its gradient, as a
compiler wants them. An operator returns as many tensors each time, none of which shares memory: an empty one stands for
no result.
Attention is one such operator without the native library too: plain torch goes through its rows one by one, and a GPU
has kernels of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake

from whet.kernels.attention.packed import _Attend, plain
from whet.kernels.batch_position import KeyedPosition
from whet.kernels.layers.fused import _AddNorm, _BiasAct, _masked, _NormSpec
from whet.kernels.native_call import native_for
from whet.kernels.specs import AttentionSpec, Drop


class _Kept:
    """What the forward of an autograd Function keeps for its backward, outside of autograd."""

    def __init__(self, **kept: Any) -> None:
        self.needs_input_grad = (True,) * 8
        self.__dict__.update(kept)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Autograd's switch; there is nothing to do here."""


def _drop(p: float, site: int, keys: Tensor | None, slots: Tensor | None, positions: Tensor | None) -> Drop | None:
    if keys is None or slots is None or positions is None:
        return None
    return Drop(p, KeyedPosition(0, 0, slots, positions, slots, slots, keys), site)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _or_none(tensor: Tensor, *, wanted: bool) -> Tensor | None:
    return tensor if wanted else None


@custom_op("whet::dropout", mutates_args=())
def dropout(x: Tensor, p: float, site: int, keys: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Return x with channels dropped; its gradient is the same operator."""
    drop = _drop(p, site, keys, slots, positions)
    assert drop is not None
    return _masked(x, drop)


@register_fake("whet::dropout")
def _(x: Tensor, *mask: Any) -> Tensor:
    return x.new_empty(x.shape)


def _keep_mask(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.p, ctx.site, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _dropout_gradient(ctx: Any, dy: Tensor) -> Any:
    return dropout(dy, ctx.p, ctx.site, *ctx.saved_tensors), None, None, None, None, None


register_autograd("whet::dropout", _dropout_gradient, setup_context=_keep_mask)


@custom_op("whet::add_norm", mutates_args=())
def add_norm(
    x: Tensor,
    residual: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normalised(s), s, mean and 1 / deviation of each row) with s = residual + dropout(x + linear_bias)."""
    kept = _Kept()
    spec = _NormSpec(eps, rms, _drop(p, site, keys, slots, positions))
    y, total = _AddNorm.forward(kept, x, residual, linear_bias, weight, bias, spec)
    assert total is not None
    _, mean, rstd, _ = kept.saved_tensors
    assert mean is not None
    assert rstd is not None
    return y, total, torch.stack([mean, rstd])


@register_fake("whet::add_norm")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty((2, math.prod(x.shape[:-1])), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), stats


@custom_op("whet::add_norm_backward", mutates_args=())
def add_norm_backward(
    dy: Tensor,
    dsum_in: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    rms: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the sum, of x where it is another one, and of linear_bias, weight and bias."""
    spec = _NormSpec(0.0, rms, _drop(p, site, keys, slots, positions))
    mean, rstd = stats.unbind()
    dtype = None if linear_bias is None else linear_bias.dtype
    kept = _Kept(saved_tensors=(total, mean, rstd, weight), params=(dtype, bias is not None), spec=spec)
    dx, dsum, dlinear, dweight, dbias, _ = _AddNorm.backward(kept, dy, dsum_in)
    dx = None if spec.drop is None else dx
    return dsum, _or_empty(dx, total), _or_empty(dlinear, weight), dweight, _or_empty(dbias, weight)


@register_fake("whet::add_norm_backward")
def _(
    dy: Tensor,
    dsum_in: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    rms: bool,
    p: float,
    site: int,
    keys: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = total.new_empty(0 if keys is None else total.shape)
    others = [weight.new_empty(0) if one is None else one.new_empty(one.shape) for one in (linear_bias, bias)]
    return total.new_empty(total.shape), dx, others[0], weight.new_empty(weight.shape), others[1]


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, linear_bias, weight, bias, _, ctx.rms, ctx.p, ctx.site, keys, slots, positions = inputs
    _, total, stats = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, stats, weight, bias, linear_bias, keys, slots, positions)


def _norm_gradient(ctx: Any, dy: Tensor | None, dsum_in: Tensor | None, _: Any) -> Any:
    total, stats, weight, bias, linear_bias, *mask = ctx.saved_tensors
    dy = torch.zeros_like(total) if dy is None else dy
    found = add_norm_backward(dy, dsum_in, total, stats, weight, bias, linear_bias, ctx.rms, ctx.p, ctx.site, *mask)
    dsum, dx, dlinear, dweight, dbias = found
    dx = dsum if mask[0] is None else dx
    dlinear = _or_none(dlinear, wanted=linear_bias is not None)
    return dx, dsum, dlinear, dweight, _or_none(dbias, wanted=bias is not None), *(None,) * 7


register_autograd("whet::add_norm", _norm_gradient, setup_context=_keep_norm)


@custom_op("whet::bias_act", mutates_args=())
def bias_act(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """Return act(x + bias); kind is that of `structs`."""
    return _BiasAct.forward(_Kept(), x, bias, kind)


@register_fake("whet::bias_act")
def _(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("whet::bias_act_backward", mutates_args=())
def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of bias."""
    dx, dbias, _ = _BiasAct.backward(_Kept(saved_tensors=(x.contiguous(), bias), kind=kind), dy)
    return dx, _or_empty(dbias, x)


@register_fake("whet::bias_act_backward")
def _(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _keep_act(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _act_gradient(ctx: Any, dy: Tensor) -> Any:
    x, bias = ctx.saved_tensors
    dx, dbias = bias_act_backward(dy, x, bias, ctx.kind)
    return dx, _or_none(dbias, wanted=bias is not None), None


register_autograd("whet::bias_act", _act_gradient, setup_context=_keep_act)


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
) -> AttentionSpec:
    n_rows = len(cu_seqlens) - 1  # a compiled block's row_slots and key_counts have one more
    counts = None if key_counts is None else key_counts[:n_rows]
    asked: Any = {"max_seqlen": max_seqlen, "kernel": kernel, "key_counts": counts}
    if keys is None or row_slots is None:
        return AttentionSpec(cu_seqlens, scale, causal, **asked)
    row_slots = row_slots[:n_rows]
    position = KeyedPosition(0, 0, row_slots, row_slots, cu_seqlens, row_slots, keys)
    return AttentionSpec(cu_seqlens, scale, causal, Drop(p, position, site), **asked)


def _tensors(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, ...]:
    """Return query, key and value; or the three of them joined in one tensor."""
    return (q,) if k is None or v is None else (q, k, v)


def _plain_attention(tensors: tuple[Tensor, ...], spec: AttentionSpec) -> Tensor:
    q, k, v = tensors[0].unbind(1) if len(tensors) == 1 else tensors
    # What the graph was told: flash kernels keep the strides of q, and under autocast float32 becomes its format.
    return plain(q, k, v, spec).to(q.dtype).contiguous()


@contextmanager
def _autograd() -> Iterator[None]:
    """Run the block with autograd, which torch leaves out below an operator."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


@custom_op("whet::attention", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, K) within rows, and a number a query and head; q may hold all three, (N, 3, H, K)."""
    spec = _spec(cu_seqlens, row_slots, scale, causal, p, site, keys, max_seqlen, kernel, key_counts)
    tensors = _tensors(q, k, v)
    if native_for(*tensors) is None:
        out = _plain_attention(tensors, spec)
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)
    kept = _Kept()
    out = _Attend.forward(kept, spec, *tensors)
    lse = kept.saved_tensors[-1]
    assert lse is not None
    return out, lse


@register_fake("whet::attention")
def _(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape if k is not None else (q.shape[0], *q.shape[2:]))
    return out, q.new_empty(out.shape[:2], dtype=torch.float32)


@custom_op("whet::attention_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; those of k and v are empty where q holds all three."""
    spec = _spec(cu_seqlens, row_slots, scale, causal, p, site, keys, max_seqlen, kernel, key_counts)
    tensors = _tensors(q, k, v)
    if native_for(*tensors) is None:
        with _autograd():
            again = tuple(tensor.detach().requires_grad_() for tensor in tensors)
            found = torch.autograd.grad(_plain_attention(again, spec), again, dout)
    else:
        kept = _Kept(
            saved_tensors=(*(t if t.stride(-1) == 1 else t.contiguous() for t in tensors), out, lse), spec=spec
        )
        found = _Attend.backward(kept, dout)[1:]
    found = tuple(grad.contiguous() for grad in found)
    dk, dv = found[1:] or (q.new_empty(0), q.new_empty(0))
    return found[0], dk, dv


@register_fake("whet::attention_backward")
def _(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> Any:
    return q.new_empty(q.shape), *(q.new_empty(0) if one is None else one.new_empty(one.shape) for one in (k, v))


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens, row_slots, ctx.scale, ctx.causal, ctx.p, ctx.site, keys, max_seqlen, ctx.kernel, counts = (
        inputs
    )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, cu_seqlens, row_slots, keys, max_seqlen, counts)


def _attention_gradient(ctx: Any, dout: Tensor, _: Any) -> Any:
    *tensors, keys, max_seqlen, counts = ctx.saved_tensors
    mask = (ctx.p, ctx.site, keys)
    dq, dk, dv = attention_backward(dout, *tensors, ctx.scale, ctx.causal, *mask, max_seqlen, ctx.kernel, counts)
    joined = tensors[3] is None
    return dq, _or_none(dk, wanted=not joined), _or_none(dv, wanted=not joined), *(None,) * 10


register_autograd("whet::attention", _attention_gradient, setup_context=_keep_attention)

REGISTERED = True
