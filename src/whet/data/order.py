"""The rows of each step as a function of (seed, epoch, step), so that resuming costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.data.sampling import EpochOrder


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
