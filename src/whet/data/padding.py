"""Which padding tokens of a padded batch a packed one computes as well, and how many each of them stands for.

A padding token attends to its row's tokens and nobody attends to it: it is a query without a key. So a few of them can
stand for all. Neighbours differ by their position alone, and their logits are much alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from whet.config.fields import PaddingInLoss

SAMPLES = 4
"""Padding tokens a row under `sampled`. The error of the loss by their number: `docs/methods/packing.md`."""


@dataclass(frozen=True)
class Padding:
    """How a padded run would pad rows, and how much of that padding the loss counts.

    `length` is what rows are padded to, None: the longest row of their batch. `token_id` is the padding token's, and
    `n_samples` how many of them are computed of each row under `sampled`.
    """

    in_loss: PaddingInLoss = "none"
    length: int | None = None
    token_id: int = 0
    n_samples: int = SAMPLES

    def fill(self, column: str) -> int:
        """Return what padding has in a token column, by its name."""
        return self.token_id if column == "input_ids" else 0

    def lengths(self, given: np.ndarray, rows_per_batch: int) -> np.ndarray:
        """Return what each row is padded to, (rows,), where every `rows_per_batch` rows of `given` lengths are a batch.

        Rows that come longer than `length` are not cut.
        """
        longest = np.maximum.reduceat(given, np.arange(0, len(given), rows_per_batch))
        return np.maximum(np.repeat(longest, rows_per_batch)[: len(given)], self.length or 0)

    def sample(self, lengths: np.ndarray, padded_lengths: np.ndarray) -> Samples:
        """Return which padding tokens are computed: the middles of equal stretches of each row's padding."""
        n_padding = padded_lengths - lengths
        most = {"none": 0, "sampled": self.n_samples, "all": n_padding.max()}[self.in_loss]
        counts = np.minimum(n_padding, most)
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin, end = (place * n_padding[row] // counts[row] for place in (number, number + 1))
        return Samples(counts=counts, columns=lengths[row] + (begin + end - 1) // 2, sizes=end - begin)


NO_PADDING = Padding()


@dataclass(frozen=True)
class Samples:
    """Padding tokens that are computed: how many of each row, and for each its column and how many it stands for."""

    counts: np.ndarray
    columns: np.ndarray
    sizes: np.ndarray

    def places(self, cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where real tokens and padding tokens are, each behind the real ones of its row.

        `cu_seqlens` says where rows would begin without padding.
        """
        before = np.cumsum(self.counts) - self.counts
        real = np.arange(cu_seqlens[-1]) + np.repeat(before, np.diff(cu_seqlens))
        return real, np.arange(len(self.columns)) + np.repeat(cu_seqlens[1:], self.counts)


@dataclass(frozen=True)
class PaddingTokens:
    """Which tokens of a packed batch's rows are padding.

    `key_counts` (rows,) int32 is how many tokens of each row are real; it stays on the CPU. `log_sizes` (N,) is the log
    of how many tokens each of the rows' tokens stands for, 0 for real ones. `real` (n_tokens,) says where the real
    tokens are, and `real_starts` (rows + 1,) where rows begin among them.
    """

    n: int
    key_counts: Tensor
    log_sizes: Tensor
    real: Tensor
    real_starts: Tensor

    @classmethod
    def of(cls, samples: Samples, cu_seqlens: np.ndarray) -> PaddingTokens:
        """Return the padding tokens of rows that would begin at `cu_seqlens` without them."""
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
        """Return these with every tensor that follows the batch to its device changed."""
        moved = {name: change(getattr(self, name)) for name in ("log_sizes", "real", "real_starts")}
        return replace(self, **moved)
