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
from whet.kernels.reference.layers import float32, wide
from whet.kernels.specs import AttentionSpec, Drop

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

    def seen(self, *, causal: bool) -> Tensor:
        """Return the keys that a query attends to, (rows, 1, 1 or T, T). Padded queries have some too: no NaN."""
        at = torch.arange(self.max_seqlen, device=self.lengths.device)
        own = (at < self.key_counts[:, None])[:, None, None]
        return own & (at <= at[:, None]) if causal else own


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Return softmax(q k^T scale) v (N, H, K) within each row; k and v (N, G, K) may have fewer heads.

    With dropout, memory grows with rows times the square of the longest row; without, as in torch's own attention.
    """
    rows = _rows_of(spec, len(q), q.device)
    group = q.shape[1] // k.shape[1]
    padded = [rows.padded(t) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    seen = rows.seen(causal=spec.causal)
    if spec.drop is None or spec.drop.p == 0.0:
        return rows.packed(functional.scaled_dot_product_attention(*padded, attn_mask=seen, scale=spec.scale))
    return rows.packed(_dropped(padded, seen, spec.scale, spec.drop))


def _rows_of(spec: AttentionSpec, n_tokens: int, device: torch.device) -> _Rows:
    starts = spec.cu_seqlens.to(device).long()
    lengths = starts.diff()
    max_seqlen = int(lengths.max() if spec.max_seqlen is None else spec.max_seqlen)
    row = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=n_tokens)
    places = torch.arange(n_tokens, device=device) - starts[row] + row * max_seqlen
    counts = lengths if spec.key_counts is None else spec.key_counts.to(device, non_blocking=True)
    return _Rows(lengths, counts, max_seqlen, places)


def _dropped(qkv: list[Tensor], seen: Tensor, scale: float, drop: Drop) -> Tensor:
    """Return the attention of padded rows with whet's masks, some rows at a time."""
    n_heads, max_seqlen = qkv[0].shape[1:3]
    n_rows = max(1, _MOST_WEIGHTS // (n_heads * max_seqlen * max_seqlen))
    slots = drop.position.row_slots.to(seen.device, non_blocking=True)[: len(seen)]
    parts = zip(*(t.split(n_rows) for t in (*qkv, seen, slots)), strict=True)
    return torch.cat([_textbook(part, scale, drop) for part in parts])


def _textbook(part: tuple[Tensor, ...], scale: float, drop: Drop) -> Tensor:
    q, k, v, seen, slots = part
    with _without_autocast(q.device.type):  # scores in half precision would be too inexact
        scores = wide(q) @ wide(k).transpose(-1, -2) * scale
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        bits = attention_bits_of_rows(drop.key, slots, *weights.shape[1:])
        kept = weights * (bits >= keep_threshold(drop.p)) * float32(drop.keep_scale)
        return (kept @ wide(v)).to(q.dtype)


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
