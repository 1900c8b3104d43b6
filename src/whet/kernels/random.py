"""Random bits as a function of their position: Philox-4x32 keyed by (seed, step, site).

There is no generator state, so a mask does not depend on padding, packing, accumulation, ranks, threads or earlier
draws. A recomputed block gets the mask of its first pass, and a resumed run needs only the step's number.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.2.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

ROUNDS = 7  # the paper's smallest round count of Philox-4x32 that passes BigCrush
LANES = 16  # one AVX-512 register of 32-bit words: word w of lane l in block b serves channel 64 b + 16 w + l
_BLOCK = 4 * LANES
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def stream_key(seed: int, step: int, site: int) -> tuple[int, int]:
    """Return the two 32-bit key words of one operator's stream in one optimizer step."""
    key = _mixed(seed & _MASK64, step, site)
    return key & _MASK32, key >> 32


def within_64_bits(number: int) -> int:
    """Return a step for `stream_key` that depends on all bits of a longer number; a shorter one is itself."""
    beyond = number >> 64
    return (number ^ _mixed(beyond)) & _MASK64 if beyond else number


def seed_torch(key: tuple[int, int]) -> None:
    """Seed torch's generators with a stream's key, as `torch.manual_seed` does.

    Without an accelerator that is the CPU's alone. For devices that are not there torch would note the seed together
    with a formatted stack of calls, twice in each call, which takes longer than to seed ten generators.
    """
    seed = key[0] | (key[1] >> 1) << 32
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Run the block, then restore the generators that everybody shares: Python's, numpy's and torch's."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.cuda.set_rng_state_all(on_gpus)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def keep_threshold(p: float) -> int:
    """Return the smallest 32-bit word with which dropout of probability `p` keeps an element.

    With p = 1 the largest word is kept, times a scale of zero (`Drop.keep_scale`).
    """
    return min(int(p * 2.0**32), _MASK32)


def hidden_bits(key: tuple[int, int], slots: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return 32 random bits per channel for tokens at (row slot, position), as (N, width) int64.

    `slots` and `positions` are (N,): the row's index in the step's global batch, and the token's index in its row.
    """
    zero = torch.zeros((), dtype=torch.int64, device=slots.device)
    return _bits(key, positions.long().view(-1, 1), slots.long().view(-1, 1), zero, width)


def attention_bits(
    key: tuple[int, int], slot: int, heads: int, n_queries: int, n_keys: int, *, device: torch.device
) -> Tensor:
    """Return 32 random bits per attention weight of one row, as (heads, queries, keys) int64."""
    return attention_bits_of_rows(key, torch.tensor([slot], device=device), heads, n_queries, n_keys)[0]


def attention_bits_of_rows(key: tuple[int, int], slots: Tensor, heads: int, n_queries: int, n_keys: int) -> Tensor:
    """Return the bits of the rows in these slots (rows,), as (rows, heads, queries, keys) int64."""
    query = torch.arange(n_queries, device=slots.device).view(-1, 1)
    head = torch.arange(1, heads + 1, device=slots.device).view(-1, 1, 1)
    return _bits(key, query, slots.long().view(-1, 1, 1, 1), head, n_keys)


def _bits(key: tuple[int, int], c1: Tensor, c2: Tensor, c3: Tensor, width: int) -> Tensor:
    """Return (..., width) words; the leading shape is the broadcast of c1, c2, c3 (each ends in a 1-dim or is 0-d)."""
    n_blocks = -(-width // _BLOCK)
    c0 = torch.arange(n_blocks * LANES, device=c1.device)
    if isinstance(key[0], Tensor):  # in a graph: inductor would compute an index times a constant in 32 bits on a GPU
        c0 = c0 + (key[0] - key[0])
    words = _philox(c0, c1, c2, c3, key)
    blocks = [word.unflatten(-1, (n_blocks, LANES)) for word in torch.broadcast_tensors(*words)]
    return torch.stack(blocks, dim=-2).flatten(-3)[..., :width]


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four output words; all words are int64 in [0, 2^32).

    A 64-bit product that wraps to negative still has the right 64 bits, so shift-and-mask reads its halves.
    """
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK32) ^ c1 ^ k0,
            high & _MASK32,
            (low >> 32 & _MASK32) ^ c3 ^ k1,
            low & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _mixed(*words: int) -> int:
    """Return a hash of the words: one step of splitmix64 for each, a bijection of 64-bit words that mixes every bit.

    Steele, Lea, Flood, OOPSLA 2014.
    """
    x = 0
    for word in words:
        x = ((x ^ word) + 0x9E3779B97F4A7C15) & _MASK64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
        x = x ^ x >> 31  # torch 2.11 compiles no ^=
    return x
