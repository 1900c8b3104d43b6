"""The fused operators in plain torch, step by step as in the papers: the reference of the native ones.

They also accept float64. With bf16 they compute in fp32 and round their results, as the native ones do.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from whet.kernels.random import attention_bits, hidden_bits, keep_threshold
from whet.kernels.specs import AdamWStep, AttentionSpec, Bias, Drop, Kind, Norm, Relative, Tables


def dropout(x: Tensor, drop: Drop) -> Tensor:
    """Return x (..., D) with channels dropped and the kept ones scaled by 1 / (1 - p)."""
    return _dropped(wide(x), drop).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, *, linear_bias: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalised(s), s) with s = residual + dropout(x + linear_bias)."""
    s = wide(x)
    if linear_bias is not None:
        s = s + wide(linear_bias)
    if drop is not None:
        s = _dropped(s, drop)
    if residual is not None:
        s = s + wide(residual)
    s = s.to(x.dtype)
    return _normalised(wide(s), norm).to(x.dtype), s


def bias_act(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """Return act(x + bias) of x (..., F)."""
    return _activated(wide(x) if bias is None else wide(x) + wide(bias), kind).to(x.dtype)


def gated_act(gate: Tensor, up: Tensor, kind: Kind) -> Tensor:
    """Return act(gate) * up; with kind silu this is SwiGLU (Shazeer 2020)."""
    return (_activated(wide(gate), kind) * wide(up)).to(gate.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v within each row (N, H, K); k and v (N, G, K) may have fewer heads.

    `bias` (H, 2 R + 1) is b by distance: bias[h, j - i + R] for key j and query i; a `Relative` computes it.
    """
    starts = spec.cu_seqlens.tolist()
    slots = [0] * (len(starts) - 1) if spec.drop is None else spec.drop.position.row_slots.tolist()
    counts = spec.cu_seqlens.diff() if spec.key_counts is None else spec.key_counts
    ends = [a + n for a, n in zip(starts[:-1], counts.tolist(), strict=True)]
    group = q.shape[1] // k.shape[1]
    rows = [
        _attend_row((q[a:b], *(t[a:end].repeat_interleave(group, 1) for t in (k, v))), spec, slot, bias)
        for a, b, end, slot in zip(starts[:-1], starts[1:], ends, slots, strict=True)
    ]
    return torch.cat(rows)


def embed(ids: Sequence[Tensor], tables: Tables, norm: Norm, *, drop: Drop | None = None) -> Tensor:
    """Return dropout(LayerNorm(sum of the embeddings)) for ids (N,) int64, one per table."""
    parts = [
        functional.embedding(i, table, padding_idx=padding)
        for i, table, padding in zip(ids, tables.tables, tables.padding_ids, strict=True)
    ]
    y = _normalised(wide(torch.stack(parts).sum(0)), norm)
    return (y if drop is None else _dropped(y, drop)).to(parts[0].dtype)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None = None) -> Tensor:
    """Return the summed cross entropy () of the logits hidden (N, D) @ weight (V, D)'; labels < 0 are ignored.

    With a cap, logits are cap tanh(logits / cap).
    """
    logits = wide(hidden @ weight.T)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return functional.cross_entropy(logits, labels.clamp_min(-1), ignore_index=-1, reduction="sum")


def row_cross_entropy(logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return -log softmax(logits of the row)[label] for each row; logits (N,), labels and result (rows,)."""
    rows = wide(to_rows(logits, cu_seqlens, -torch.inf))
    return functional.cross_entropy(rows, labels, reduction="none")


def to_rows(flat: Tensor, cu_seqlens: Tensor, fill: float) -> Tensor:
    """Return the rows of `flat` (N,) as a table (rows, longest), filled up with `fill`."""
    lengths = cu_seqlens.diff()
    rows = flat.new_full((len(lengths), int(lengths.max())), fill)
    return rows.masked_scatter(torch.arange(rows.shape[1], device=flat.device) < lengths[:, None], flat)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements of all tensors."""
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def adamw(
    state: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], rates: Sequence[tuple[float, float]], step: AdamWStep
) -> None:
    """Update (parameter, gradient, m, v) in place; rates are (learning rate, weight decay) per tensor.

    Loshchilov and Hutter 2019, algorithm 2.
    """
    correction1, correction2 = 1 - step.beta1**step.step, 1 - step.beta2**step.step
    with torch.no_grad():
        for (param, grad, m, v), (lr, decay) in zip(state, rates, strict=True):
            g = grad.to(m.dtype) * step.grad_scale
            m.lerp_(g, 1 - step.beta1)
            v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
            move = (m / correction1) / ((v / correction2).sqrt() + step.eps)
            param.copy_(param.to(m.dtype) * (1 - lr * decay) - lr * move)


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype to compute in: float64 unchanged, everything else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def _dropped(x: Tensor, drop: Drop) -> Tensor:
    bits = hidden_bits(drop.key, *drop.position.places(prod(x.shape[:-1])), x.shape[-1])
    return x * (bits >= keep_threshold(drop.p)).view(x.shape) * float32(drop.keep_scale)


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    centred = x if norm.rms else x - x.mean(-1, keepdim=True)
    square = centred.square().mean(-1, keepdim=True)
    # An overflow must be visible: x / inf would be 0, and a broken row would look valid.
    inverse = torch.where(square.isinf(), torch.nan, torch.rsqrt(square + norm.eps))
    y = centred * inverse * wide(norm.weight)
    return y if norm.bias is None else y + wide(norm.bias)


def _activated(x: Tensor, kind: Kind) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _attend_row(qkv: tuple[Tensor, ...], spec: AttentionSpec, slot: int, bias: Bias | None) -> Tensor:
    q, k, v = qkv
    distance = torch.arange(len(k), device=q.device) - torch.arange(len(q), device=q.device)[:, None]
    scores = torch.einsum("ihk,jhk->hij", wide(q), wide(k)) * spec.scale
    if isinstance(bias, Tensor):
        scores = scores + wide(bias)[:, distance + bias.shape[1] // 2]
    elif bias is not None:
        scores = scores + products_by_distance(q.transpose(0, 1), k.transpose(0, 1), bias, distance) * spec.scale
    unseen = unseen_at(distance, spec)
    blind = unseen.all(-1, keepdim=True)  # it sees all keys at first: a softmax over none has no gradient
    weights = torch.softmax(scores.masked_fill(unseen & ~blind, -torch.inf), dim=-1).masked_fill(blind, 0.0)
    if spec.drop is not None:
        bits = attention_bits(spec.drop.key, slot, *weights.shape, device=q.device)
        weights = weights * (bits >= keep_threshold(spec.drop.p)) * float32(spec.drop.keep_scale)
    return torch.einsum("hij,jhk->ihk", weights, wide(v)).to(q.dtype)


def products_by_distance(q: Tensor, k: Tensor, by: Relative, distance: Tensor) -> Tensor:
    """Return q_i . keys[p] + k_j . queries[p] (..., H, T, T) of q and k (..., H, T, K); keys may be fewer.

    `distance` (T, T) is j - i of each pair, and p its place in the tables.
    """
    places = by.places.long()[distance + len(by.places) // 2]
    found = wide(q).new_zeros(*q.shape[:-1], k.shape[-2])
    if by.keys is not None:
        products = torch.einsum("...hik,phk->...hip", wide(q), wide(by.keys))
        found = found + products.gather(-1, places.expand(found.shape))
    if by.queries is not None:
        products = torch.einsum("...hjk,phk->...hjp", wide(k), wide(by.queries))
        found = found + products.gather(-1, places.T.expand(found.mT.shape)).mT
    return found


def unseen_at(distance: Tensor, spec: AttentionSpec) -> Tensor:
    """Return, for distances j - i, whether query i does not attend to key j."""
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if spec.causal:
        unseen = distance > 0
    return unseen if spec.window is None else unseen | (distance.abs() > spec.window)


def float32(x: float) -> float:
    """Return x rounded to float32, as the native operators use it."""
    return float(torch.tensor(x, dtype=torch.float32))
