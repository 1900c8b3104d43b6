"""Which rows make which step: an index function of (seed, epoch, step), so that resuming costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """The rows of every optimizer step of a run.

    An epoch visits each row once; its last step may hold fewer rows, unless `drop_last`.
    """

    n_rows: int
    rows_per_step: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, at least 1."""
        whole, rest = divmod(self.n_rows, self.rows_per_step)
        return max(whole + (rest > 0 and not self.drop_last), 1)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of optimizer step `step` (counted from 0 over the whole run), (rows,) int64."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.rows_per_step
        return self._epoch(epoch)[first : first + self.rows_per_step]

    def epoch(self, step: int) -> float:
        """Return how many epochs are done after `step` steps."""
        return step / self.steps_per_epoch

    def _epoch(self, epoch: int) -> np.ndarray:
        return _permutation(self.n_rows, self.seed, epoch) if self.shuffle else np.arange(self.n_rows)


@lru_cache(maxsize=2)
def _permutation(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the row order of one epoch, a function of its arguments alone (Philox counter keyed by seed and epoch)."""
    order = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), epoch])).permutation(n_rows)
    order.setflags(write=False)
    return order
