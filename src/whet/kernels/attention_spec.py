"""What attention within packed sequences computes: its settings, and the reference in plain torch, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.kernels.batch_position import Drop, Kernel
from whet.kernels.operator import rounded, wide
from whet.kernels.random import attention_bits, keep_threshold


@dataclass(frozen=True)
class AttentionSpec:
    """How attention runs: sequence r has the tokens cu_seqlens[r] to cu_seqlens[r + 1] and attends only to itself.

    `cu_seqlens` (rows + 1,) is int32. `max_seqlen` (), the tokens of the longest sequence, stays on the CPU, so that
    nothing waits for a GPU; None: it is computed from `cu_seqlens`. `key_counts` (rows,) int32, on the CPU: only the
    first key_counts[r] tokens of sequence r are keys; the others are padding tokens, which are queries alone. None: all
    tokens are keys. A causal mask requires None. `window`: a token attends only to keys at most this far from it; a
    token without any gives 0, as in torch's own attention. None: no such limit.
    """

    cu_seqlens: Tensor
    scale: float
    causal: bool = False
    drop: Drop | None = None
    max_seqlen: Tensor | None = None
    kernel: Kernel = "auto"
    key_counts: Tensor | None = None
    window: int | None = None


def window_of(sliding_window: int | None) -> int | None:
    """Return `AttentionSpec.window` for the number of keys that a token sees on one side, itself included.

    Raises ConfigError for less than one key: a negative window would mean none to the operators.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ConfigError(
            what="a window of the model's attention holds no token",
            got=sliding_window,
            why="each token sees itself",
            fix="set sliding_window in config.json to 1 or more, or to null for none",
        )
    return None if sliding_window is None else sliding_window - 1


@dataclass(frozen=True)
class Relative:
    """Vectors by distance, for disentangled attention (He et al. 2021, arXiv:2006.03654, equation 4).

    With p = places[j - i + R], scale * (q_i . keys[p] + k_j . queries[p]) is added to the score of key j and query i.
    `keys` and `queries` (P, H, K) may be views whose last dimension is contiguous; None: without this term. `places`
    (2 R + 1,) is int32. No sequence is longer than R + 1.
    """

    keys: Tensor | None
    queries: Tensor | None
    places: Tensor


Bias = Tensor | Relative
"""What attention adds to its scores: numbers (H, 2 R + 1) by distance, or products with vectors by distance."""


def attend_reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
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
        weights = weights * (bits >= keep_threshold(spec.drop.p)) * rounded(spec.drop.keep_scale)
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
