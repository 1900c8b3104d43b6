"""Packed attention in plain torch, all rows in one call: runs on a GPU if no flash kernel can.

The reference in `reference/layers.py` computes row by row and reads the row boundaries back from the GPU. Here rows are
padded, no number is read back, and dropout masks are the same as on every other path of whet.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whet.kernels.random import attention_bits_of_rows, keep_threshold
from whet.kernels.reference.layers import float32, products_by_distance, unseen_at, wide
from whet.kernels.specs import AttentionSpec, Bias, Drop

_MOST_WEIGHTS = 1 << 25
"""Attention weights computed at a time under dropout: their random words take 8 bytes each."""


@dataclass(frozen=True)
class _Rows:
    """The positions of the tokens (N,) in the padded form (rows, T)."""

    lengths: Tensor
    key_counts: Tensor
    max_seqlen: int
    places: Tensor

    def padded(self, x: Tensor) -> Tensor:
        """Return (N, H, K) as (rows, H, T, K), with zeros in the padding."""
        n_rows = len(self.lengths)
        flat = x.new_zeros(n_rows * self.max_seqlen, *x.shape[1:]).index_copy(0, self.places, x)
        return flat.unflatten(0, (n_rows, self.max_seqlen)).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Return (rows, H, T, K) as (N, H, K)."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)

    def seen(self, spec: AttentionSpec) -> Tensor:
        """Return the keys that a query attends to, (rows, 1, 1 or T, T).

        Without a window, padded queries have some too.
        """
        at = torch.arange(self.max_seqlen, device=self.lengths.device)
        own = (at < self.key_counts[:, None])[:, None, None]
        limited = spec.causal or spec.window is not None
        return own & ~unseen_at(at - at[:, None], spec) if limited else own

    def biases(self, bias: Bias, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the biases (1 or rows, H, T, T) of padded queries and keys (rows, H, T, K)."""
        at = torch.arange(self.max_seqlen, device=q.device)
        distance = at - at[:, None]
        if isinstance(bias, Tensor):
            return wide(bias)[None, :, distance + bias.shape[1] // 2]
        with _without_autocast(q.device.type):  # as for the scores
            return products_by_distance(q, k, bias, distance) * scale


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each row; k and v (N, G, K) may have fewer heads.

    `bias` is b, as in `packed.attend`; memory then grows with the square of the longest
    row. With dropout, memory grows with rows times that square; without either, as in torch's own attention.
    """
    rows = _rows_of(spec, len(q), q.device)
    group = q.shape[1] // k.shape[1]
    padded = [rows.padded(t) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    seen = rows.seen(spec)
    blind = ~seen.any(-1, keepdim=True)  # such a query sees all keys at first: a softmax over none has no gradient
    mask = seen | blind
    if bias is not None:
        mask = torch.where(mask, rows.biases(bias, padded[0], padded[1], spec.scale), -torch.inf)
    if spec.drop is None or spec.drop.p == 0.0:
        mask = mask.to(q.dtype) if mask.is_floating_point() else mask
        found = functional.scaled_dot_product_attention(*padded, attn_mask=mask, scale=spec.scale)
    else:
        found = _dropped(padded, mask, spec.scale, spec.drop)
    return rows.packed(found if spec.window is None else found.masked_fill(blind, 0.0))


def _rows_of(spec: AttentionSpec, n_tokens: int, device: torch.device) -> _Rows:
    starts = spec.cu_seqlens.to(device).long()
    lengths = starts.diff()
    max_seqlen = int(lengths.max() if spec.max_seqlen is None else spec.max_seqlen)
    row = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=n_tokens)
    places = torch.arange(n_tokens, device=device) - starts[row] + row * max_seqlen
    counts = lengths if spec.key_counts is None else spec.key_counts.to(device, non_blocking=True)
    return _Rows(lengths, counts, max_seqlen, places)


def _dropped(qkv: list[Tensor], mask: Tensor, scale: float, drop: Drop) -> Tensor:
    """Return the attention of padded rows with whet's masks, some rows at a time.

    `mask` is true where a key is seen, or what to add to the scores.
    """
    n_heads, max_seqlen = qkv[0].shape[1:3]
    n_rows = max(1, _MOST_WEIGHTS // (n_heads * max_seqlen * max_seqlen))
    slots = drop.position.row_slots.to(mask.device, non_blocking=True)[: len(mask)]
    parts = zip(*(t.split(n_rows) for t in (*qkv, mask, slots)), strict=True)
    return torch.cat([_textbook(part, scale, drop) for part in parts])


def _textbook(part: tuple[Tensor, ...], scale: float, drop: Drop) -> Tensor:
    q, k, v, mask, slots = part
    with _without_autocast(q.device.type):  # scores in half precision would be too inexact
        scores = wide(q) @ wide(k).transpose(-1, -2) * scale
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        bits = attention_bits_of_rows(drop.key, slots, *weights.shape[1:])
        kept = weights * (bits >= keep_threshold(drop.p)) * float32(drop.keep_scale)
        return (kept @ wide(v)).to(q.dtype)


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
