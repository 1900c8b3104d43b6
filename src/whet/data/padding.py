"""The padding tokens that a packed batch computes, and how many padding tokens each of them represents.

A padding token attends to its row's tokens, and no token attends to it. A few can therefore represent all: neighbours
differ only by their position, and their logits are similar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.config.fields import PaddingInLoss

SAMPLES = 4
"""Padding tokens per row under `sampled`. The resulting error of the loss: `docs/qa.md`."""


_GOLDEN = 0.6180339887498949
SPREAD = 0.6
"""The part of a stretch in which its computed token may lie, around the middle."""


def offset_frac(lengths: Any) -> Any:
    """Return how far into its stretch of padding the computed token lies, for rows of these lengths (an array).

    Logits rise and fall with the position alike in all rows. So the rows of a batch get different offsets around the
    middle, and these errors cancel. An offset depends only on its row's length, not on how a batch is split.
    """
    return 0.5 + ((0.5 + lengths * _GOLDEN) % 1.0 - 0.5) * SPREAD


@dataclass(frozen=True)
class Padding:
    """How a padded run would pad rows, and how much of that padding the loss counts.

    Rows are padded to `length`; None: to the longest row of their batch. `token_id` is the padding token's id, and
    `n_samples` the number of padding tokens that are computed for each row under `sampled`.
    """

    in_loss: PaddingInLoss = "none"
    length: int | None = None
    token_id: int = 0
    n_samples: int = SAMPLES

    def fill(self, column: str) -> int:
        """Return the value of padding tokens in the column of this name."""
        return self.token_id if column == "input_ids" else 0

    def lengths(self, given: np.ndarray, rows_per_batch: int) -> np.ndarray:
        """Return the padded length of each row, (rows,); every `rows_per_batch` rows of `given` lengths are a batch.

        Rows longer than `length` are not truncated.
        """
        longest = np.maximum.reduceat(given, np.arange(0, len(given), rows_per_batch))
        return np.maximum(np.repeat(longest, rows_per_batch)[: len(given)], self.length or 0)

    def sample(self, lengths: np.ndarray, padded_lengths: np.ndarray) -> Samples:
        """Return the padding tokens to compute: one near the middle of each of a row's equal stretches of padding."""
        n_padding = padded_lengths - lengths
        most = {"none": 0, "sampled": self.n_samples, "all": n_padding.max()}[self.in_loss]
        counts = np.minimum(n_padding, most)
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin, end = (place * n_padding[row] // counts[row] for place in (number, number + 1))
        within = ((end - begin) * offset_frac(lengths[row])).astype(np.int64)
        return Samples(counts=counts, columns=lengths[row] + begin + within, sizes=end - begin)


NO_PADDING = Padding()


@dataclass(frozen=True)
class Samples:
    """Computed padding tokens: their number in each row, and the column and the represented number of each."""

    counts: np.ndarray
    columns: np.ndarray
    sizes: np.ndarray

    def places(self, cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of real and of padding tokens; padding tokens follow the real ones of their row.

        `cu_seqlens` has the row boundaries without padding.
        """
        before = np.cumsum(self.counts) - self.counts
        real = np.arange(cu_seqlens[-1]) + np.repeat(before, np.diff(cu_seqlens))
        return real, np.arange(len(self.columns)) + np.repeat(cu_seqlens[1:], self.counts)


@dataclass(frozen=True)
class PaddingTokens:
    """The padding tokens of a packed batch.

    `key_counts` (rows,) int32 is the number of real tokens in each row; it stays on the CPU. `log_sizes` (N,) is the
    log of the number of tokens that each token represents, 0 for real ones. `real` (n_tokens,) has the positions of the
    real tokens, and `real_starts` (rows + 1,) the row boundaries among them.
    """

    n: int
    key_counts: Tensor
    log_sizes: Tensor
    real: Tensor
    real_starts: Tensor

    @classmethod
    def of(cls, samples: Samples, cu_seqlens: np.ndarray) -> PaddingTokens:
        """Return the padding tokens of rows whose boundaries without them are `cu_seqlens`."""
        real, padding = samples.places(cu_seqlens)
        log_sizes = np.zeros(len(real) + len(padding), dtype=np.float32)
        log_sizes[padding] = np.log(samples.sizes)
        return cls(
            n=len(padding),
            key_counts=torch.from_numpy(np.diff(cu_seqlens).astype(np.int32)),
            log_sizes=torch.from_numpy(log_sizes),
            real=torch.from_numpy(real),
            real_starts=torch.from_numpy(cu_seqlens.astype(np.int32)),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> PaddingTokens:
        """Return these with `change` applied to every tensor that moves to the batch's device."""
        moved = {name: change(getattr(self, name)) for name in ("log_sizes", "real", "real_starts")}
        return replace(self, **moved)
