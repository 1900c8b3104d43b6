"""The batches of a run: from the steps of its plan to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whet.config.rules_loading import PREFETCH_FACTOR
from whet.data import budget
from whet.data.batch import Batch
from whet.data.prefetch import Piece, Prefetcher, Source
from whet.log import logger

if TYPE_CHECKING:
    from whet.train.fit import Fit


def build(fit: Fit) -> Prefetcher:
    """Return what makes the batches of this run, in as many threads as its arguments ask for."""
    args, trainer, n_workers = fit.args, fit.trainer, fit.args.dataloader_num_workers
    pinned = trainer.device.type == "cuda" and args.dataloader_pin_memory is not False
    if args.dataloader_pin_memory and not pinned:
        logger.warning(
            "dataloader_pin_memory does nothing here: pinned memory speeds up copies to a GPU, and none is used"
        )

    def pieces(place: int) -> list[Piece]:
        rows = fit.plan.order.rows(place)
        cuts = budget.cuts(trainer.train_dataset, rows, fit.micro_rows, args.max_tokens_per_batch)
        return [(rows[first:last], first) for first, last in cuts]

    def make(rows: np.ndarray, first_slot: int) -> Batch:
        batch = trainer.objective.batch(trainer.train_dataset, rows, first_slot)
        return batch.pinned() if pinned else batch

    def end(place: int) -> int:
        n_steps, per_epoch = fit.plan.n_steps, fit.plan.order.steps_per_epoch
        return n_steps if args.dataloader_persistent_workers else min(n_steps, (place // per_epoch + 1) * per_epoch)

    factor = args.dataloader_prefetch_factor or PREFETCH_FACTOR
    return Prefetcher(Source(pieces=pieces, make=make, end=end), n_workers, n_workers * factor)
