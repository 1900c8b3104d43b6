"""Packed attention in flash kernels for rows of any length (Dao 2023); memory is linear in the tokens."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whet.kernels.random import stream_key
from whet.kernels.specs import AttentionSpec, Drop
from whet.optional import require


@dataclass(frozen=True)
class _Rows:
    starts: Tensor
    key_starts: Tensor
    max_seqlen: int
    p: float


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, package: bool = False) -> Tensor:
    """Return softmax(q k^T scale) v (N, H, K) within each row, in float16 or bfloat16.

    The kernel draws its dropout mask from the device's generator, which is set for this call from (seed, step, site,
    first row) and restored afterwards. A recomputation or a resumed run gets the same mask; another split into
    micro-batches does not. The kernels store p in 8 bits: the kept part differs from 1 - p by up to 1/256.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    drop = spec.drop if spec.drop is not None and spec.drop.p > 0.0 else None
    max_seqlen = spec.cu_seqlens.diff().max() if spec.max_seqlen is None else spec.max_seqlen
    starts = spec.cu_seqlens.to(q.device)
    k, v, key_starts = (k, v, starts) if spec.key_counts is None else _keys_alone(k, v, starts, spec.key_counts)
    rows = _Rows(starts, key_starts, int(max_seqlen), 0.0 if drop is None else drop.p)
    with _drawing_from(drop, q.device):
        return (_by_package if package else _by_torch)(q, k, v, rows, spec)


def call_seed(drop: Drop) -> int:
    """Return the generator's seed of this call: one for each (seed, step, site) and first row of the micro-batch."""
    low, high = drop.key
    low, high = stream_key(low | high << 32, int(drop.position.row_slots[0]), 0)
    return low | (high >> 1) << 32


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that kernels on this GPU draw from."""
    return torch.cuda.default_generators[device.index or 0]


def _by_torch(q: Tensor, k: Tensor, v: Tensor, rows: _Rows, spec: AttentionSpec) -> Tensor:
    # torch.nn.attention.varlen runs this operator too, but has no dropout; it has a gradient of its own.
    forward = torch.ops.aten._flash_attention_forward
    lengths = (rows.starts, rows.key_starts, rows.max_seqlen, rows.max_seqlen)
    reach = -1 if spec.window is None else spec.window
    window = {"window_size_left": reach, "window_size_right": 0 if spec.causal else reach}
    options = {} if spec.window is None else window
    return forward(q, k, v, *lengths, rows.p, spec.causal, False, scale=spec.scale, **options)[0]


def _by_package(q: Tensor, k: Tensor, v: Tensor, rows: _Rows, spec: AttentionSpec) -> Tensor:
    found = require("flash_attn", needed_for="--attn_implementation flash_attention_2", install="flash-attn")
    return found.flash_attn_varlen_func(
        q,
        k,
        v,
        rows.starts,
        rows.key_starts,
        rows.max_seqlen,
        rows.max_seqlen,
        dropout_p=rows.p,
        softmax_scale=spec.scale,
        causal=spec.causal,
        window_size=(-1, -1) if spec.window is None else (spec.window, spec.window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _keys_alone(k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values without the tokens that are only queries, and the row boundaries."""
    key_starts = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    skipped = (starts[:-1] - key_starts[:-1].to(starts.device, non_blocking=True)).long()
    on_device, n_keys = counts.to(starts.device, non_blocking=True), int(key_starts[-1])
    places = torch.arange(n_keys, device=starts.device) + skipped.repeat_interleave(on_device, output_size=n_keys)
    return k.index_select(0, places), v.index_select(0, places), key_starts.to(starts.device, non_blocking=True)


def _drawing_from(drop: Drop | None, device: torch.device) -> AbstractContextManager[None]:
    return nullcontext() if drop is None else _seeded(generator_of(device), call_seed(drop))


@contextmanager
def _seeded(generator: torch.Generator, seed: int) -> Iterator[None]:
    """Run the block with the generator seeded; restore its state afterwards."""
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
