"""The operators in plain torch, as the textbooks have them: what the native ones are tested against."""

import torch
from torch import Tensor

from whet.kernels.place import Place
from whet.kernels.random import attention_bits, hidden_bits, keep_threshold, stream_key


def dropout(x: Tensor, p: float, place: Place, site: int) -> Tensor:
    """Return x (..., N, D) with each channel dropped with probability p and the kept ones scaled by 1 / (1 - p)."""
    key = stream_key(place.seed, place.step, site)
    keep = hidden_bits(key, place.slots, place.positions, x.shape[-1]) >= keep_threshold(p)
    return x * _scaled(keep, p, x.dtype).view(x.shape)


def packed_attention(qkv: tuple[Tensor, Tensor, Tensor], scale: float, p: float, place: Place, site: int) -> Tensor:
    """Return softmax(q k^T scale) v of each row by itself, with dropout on the weights; all tensors (N, H, K).

    Vaswani et al. 2017, equation 1, and section 5.4 for the dropout. A row sees only itself.
    """
    starts = place.row_starts.tolist()
    rows = [
        _attend([tensor[start:end] for tensor in qkv], scale, p, place, site, slot)
        for start, end, slot in zip(starts[:-1], starts[1:], place.row_slots.tolist(), strict=True)
    ]
    return torch.cat(rows)


def _attend(qkv: list[Tensor], scale: float, p: float, place: Place, site: int, slot: int) -> Tensor:
    q, k, v = (tensor.transpose(0, 1) for tensor in qkv)  # (H, T, K)
    if p == 0.0:
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]
        return out.transpose(0, 1)
    weights = torch.softmax(q @ k.transpose(1, 2) * scale, dim=-1)
    key = stream_key(place.seed, place.step, site)
    bits = attention_bits(key, slot, *weights.shape, device=q.device)
    return (weights * _scaled(bits >= keep_threshold(p), p, weights.dtype) @ v).transpose(0, 1)


def _scaled(keep: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return keep.to(dtype) * (1.0 / (1.0 - p))
