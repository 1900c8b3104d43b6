"""The order of the rows: in each epoch, by the rules of transformers' Trainer, and so the rows of each step.

All are functions of (seed, epoch, step) alone, so that resuming costs nothing.
transformers 5.24 with accelerate 1.15: `SeedableRandomSampler`, `LengthGroupedSampler`, `BatchRebalanceSampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from whet.data.store import RowStore
from whet.errors import DataError

EpochOrder = Callable[[int], np.ndarray]
"""Epoch, from 0 -> the rows in their order, (rows,) int64, read-only."""

REBALANCE_SEED = 42
"""The fixed seed of transformers' batch_rebalance."""
_MOST_STEPS_SORTED = 50
_SEEDS = 2**64


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """The rows of every optimizer step of a run, split as in transformers' Trainer.

    The last batch of an epoch may have fewer rows, or is dropped by `drop_last`. The last step of an epoch takes the
    remaining batches.
    """

    epochs: EpochOrder
    """Returns the rows of an epoch in their order, `n_rows` of them."""
    n_rows: int
    rows_per_batch: int
    batches_per_step: int = 1
    drop_last: bool = False

    @property
    def batches_per_epoch(self) -> int:
        """Forward passes in one epoch."""
        full, rest = divmod(self.n_rows, self.rows_per_batch)
        return full + (rest > 0 and not self.drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, at least 1."""
        return max(-(-self.batches_per_epoch // self.batches_per_step), 1)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of optimizer step `step` (counted from 0 over the complete run), (rows,) int64."""
        epoch, within = divmod(step, self.steps_per_epoch)
        rows_per_step = self.rows_per_batch * self.batches_per_step
        behind = self.batches_per_epoch * self.rows_per_batch
        return self.epochs(epoch)[within * rows_per_step : min((within + 1) * rows_per_step, behind)]

    def epoch(self, step: int) -> float:
        """Return how many epochs are done after `step` steps, by the batches of these steps."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch + min(within * self.batches_per_step / max(self.batches_per_epoch, 1), 1.0)


# ---- the order of an epoch ----


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
    return torch.randperm(n_rows, generator=generator, device="cpu").numpy()


def _replayed(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the generator's permutation after those of earlier epochs; a DataLoader draws once in each."""
    generator = torch.Generator().manual_seed(seed % _SEEDS)
    for _ in range(epoch):
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        torch.randperm(n_rows, generator=generator, device="cpu")
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return torch.randperm(n_rows, generator=generator, device="cpu").numpy()


def _grouped(lengths: np.ndarray, rows_per_step: int, order: np.ndarray) -> np.ndarray:
    """Return the order with each group of steps sorted by length, longest first."""
    n_steps = min(len(order) // (4 * rows_per_step), _MOST_STEPS_SORTED) or 1
    size = n_steps * rows_per_step
    stretches = [_longest_first(order[first : first + size], lengths) for first in range(0, len(order), size)]
    longest = int(torch.tensor([int(lengths[stretch[0]]) for stretch in stretches], device="cpu").argmax())
    first, other = stretches[0][0], stretches[longest][0]
    stretches[0][0], stretches[longest][0] = other, first
    return np.concatenate(stretches)


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return rows[np.argsort(-lengths[rows], kind="stable")]


def _dealt(rows: np.ndarray, lengths: np.ndarray, n_hands: int) -> np.ndarray:
    ordered = _longest_first(rows, lengths)
    return np.concatenate([ordered[hand::n_hands] for hand in range(n_hands)])


# ---- the lengths of rows ----


def lengths_of(dataset: Any, column: str) -> np.ndarray:
    """Return the length of each row, (rows,) int64: the values of `column` if it exists, else the number of tokens.

    Without the column, every row is read.
    """
    if isinstance(dataset, RowStore):
        return dataset.lengths
    if column in (getattr(dataset, "column_names", None) or ()):
        return _integers(dataset[column], column)
    return np.asarray([_n_tokens(dataset[row], row) for row in range(len(dataset))], dtype=np.int64)


def _n_tokens(row: Any, index: int) -> int:
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    raise DataError(
        what=f"row {index} of the training set has no length",
        got=sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__,
        why="group_by_length and batch_rebalance sort the rows by their number of tokens",
        fix="give rows with input_ids, or a data set with a column of lengths and name it in --length_column_name; "
        "--train_sampling_strategy random needs no lengths",
    )


def _integers(values: Any, column: str) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths, not numbers
        found = np.empty(0, dtype=object)
    if found.ndim == 1 and found.dtype.kind in "iu":
        return found.astype(np.int64)
    raise DataError(
        what=f"the column {column} does not contain lengths",
        got=f"its first entry is {str(values[0])[:80]}",
        why="--length_column_name names the column with each row's number of tokens, an integer",
        fix="name another column in --length_column_name; without one, the lengths of input_ids are counted",
    )
