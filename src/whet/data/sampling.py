"""The order of the rows in each epoch, by the rules of transformers' Trainer: functions of the epoch's number alone.

transformers 5.24 with accelerate 1.15: `SeedableRandomSampler`, `LengthGroupedSampler`, `BatchRebalanceSampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

EpochOrder = Callable[[int], np.ndarray]
"""Epoch, from 0 -> the rows in their order, (rows,) int64, read-only."""

REBALANCE_SEED = 42
"""The fixed seed of transformers' batch_rebalance."""
_MOST_STEPS_SORTED = 50
_SEEDS = 2**64


def sequential(n_rows: int) -> EpochOrder:
    """Return the order of the data."""
    return _kept(lambda _: np.arange(n_rows))


def shuffled(n_rows: int, seed: int) -> EpochOrder:
    """Return a new permutation for each epoch: torch.randperm with a generator seeded by seed + epoch."""
    return _kept(lambda epoch: _permutation(n_rows, seed + epoch))


def grouped_by_length(lengths: np.ndarray, rows_per_step: int, seed: int) -> EpochOrder:
    """Return permutations in which the rows of a step are of similar length, and the longest row comes first.

    transformers draws them from torch's global generator, which its Trainer seeds once. The draws of that generator
    are replayed here, so every epoch is the same if nothing else draws (no dropout, no evaluation in between).
    """
    return _kept(lambda epoch: _grouped(lengths, rows_per_step, _replayed(len(lengths), seed, epoch)))


def rebalanced(lengths: np.ndarray, rows_per_step: int, batches_per_step: int, seed: int) -> EpochOrder:
    """Return permutations that distribute a step's rows so that its batches have about as many tokens.

    The rows of a step are those of transformers' batch_rebalance. A last step with fewer rows than batches is filled
    up with the epoch's first rows.
    """
    n_more = n_rebalanced(len(lengths), rows_per_step, batches_per_step) - len(lengths)

    def one(epoch: int) -> np.ndarray:
        order = _permutation(len(lengths), seed + epoch)
        order = np.concatenate([order, np.resize(order, n_more)])
        steps = [order[first : first + rows_per_step] for first in range(0, len(order), rows_per_step)]
        return np.concatenate([_dealt(rows, lengths, batches_per_step) for rows in steps])

    return _kept(one)


def n_rebalanced(n_rows: int, rows_per_step: int, batches_per_step: int) -> int:
    """Return the number of rows in an epoch of `rebalanced`, repeated ones included."""
    rest = n_rows % rows_per_step
    return n_rows + (max(batches_per_step - rest, 0) if rest else 0)


def _kept(order: EpochOrder) -> EpochOrder:
    """Return the function with a cache of its last two results, read-only: each step of an epoch calls it."""

    @lru_cache(maxsize=2)
    def kept(epoch: int) -> np.ndarray:
        rows = order(epoch)
        rows.setflags(write=False)
        return rows

    return kept


def _permutation(n_rows: int, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed % _SEEDS)
    return torch.randperm(n_rows, generator=generator).numpy()


def _replayed(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the generator's permutation after those of earlier epochs; a DataLoader draws once in each."""
    generator = torch.Generator().manual_seed(seed % _SEEDS)
    for _ in range(epoch):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        torch.randperm(n_rows, generator=generator)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return torch.randperm(n_rows, generator=generator).numpy()


def _grouped(lengths: np.ndarray, rows_per_step: int, order: np.ndarray) -> np.ndarray:
    """Return the order with each group of steps sorted by length, longest first."""
    n_steps = min(len(order) // (4 * rows_per_step), _MOST_STEPS_SORTED) or 1
    size = n_steps * rows_per_step
    stretches = [_longest_first(order[first : first + size], lengths) for first in range(0, len(order), size)]
    longest = int(torch.tensor([int(lengths[stretch[0]]) for stretch in stretches]).argmax())
    first, other = stretches[0][0], stretches[longest][0]
    stretches[0][0], stretches[longest][0] = other, first
    return np.concatenate(stretches)


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return rows[np.argsort(-lengths[rows], kind="stable")]


def _dealt(rows: np.ndarray, lengths: np.ndarray, n_hands: int) -> np.ndarray:
    ordered = _longest_first(rows, lengths)
    return np.concatenate([ordered[hand::n_hands] for hand in range(n_hands)])
