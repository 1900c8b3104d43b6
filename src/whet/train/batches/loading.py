"""The batches of a run, step by step of its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from whet.config.rules.memory import PREFETCH_FACTOR
from whet.data.batch import Batch
from whet.data.prefetch import Piece, Prefetcher, Source, draws_in_threads
from whet.log import logger
from whet.train.batches import plan, streams
from whet.train.batches.draws import Draws
from whet.train.batches.pieces import pieces_of
from whet.train.compat import dataloaders
from whet.train.compat.public import PublicTrainer
from whet.train.resume import schema
from whet.train.run import Run
from whet.train.state import State
from whet.train.sync import Sync


class Loader(Protocol):
    """The batches of each step, and where epochs begin and end. `plan_step` counts the steps of the plan."""

    micro_rows: int
    """Most rows of a micro-batch; auto_find_batch_size lowers it before the first step."""
    n_left_out: int
    """Steps of epochs that a callback ended early."""

    def take(self, plan_step: int) -> list[Batch]:
        """Return the batches of this step; none if there are no more rows."""
        ...

    def sample(self, plan_step: int) -> np.ndarray | Batch:
        """Return rows of the training set, or a batch, of the size of this step's. Nothing is taken."""
        ...

    def begins_epoch(self, plan_step: int) -> bool:
        """Return whether this step is the first of an epoch."""
        ...

    def ends_epoch(self, plan_step: int) -> bool:
        """Return whether the step before this one was the last of an epoch."""
        ...

    def skip_epoch(self, plan_step: int) -> None:
        """Continue with the next epoch; the remaining steps of this one are left out."""
        ...

    def epochs_done(self, plan_step: int) -> float:
        """Return how many epochs are done before this step."""
        ...

    def state(self) -> State:
        """Return what the step number does not say about the position in the data."""
        ...

    def load_state(self, saved: State) -> None:
        """Restore what `state` returned; nothing is read before `open`."""
        ...

    def open(self) -> None:
        """Read up to the saved position; raises DataError if the source gives other rows than before."""
        ...

    def close(self) -> None:
        """End the threads and release the data."""
        ...


@dataclass(frozen=True)
class StreamOrder:
    """The steps of an epoch whose rows have no index; the steps of the run if that is unknown."""

    steps_per_epoch: int


class PlannedLoader:
    """Batches of rows with an index, in the order of the plan. Any step can be read at any time."""

    def __init__(self, run: Run, collator: Any) -> None:
        args = run.args
        self.micro_rows = args.per_device_train_batch_size
        self.n_left_out = 0
        self._run, self._order = run, run.plan.order
        self._pinned = run.device.type == "cuda" and args.dataloader_pin_memory is not False
        if args.dataloader_pin_memory and not self._pinned:
            logger.warning(
                "dataloader_pin_memory has no effect: pinned memory speeds up copies to a GPU, and none is used"
            )
        n_workers, factor = args.dataloader_num_workers, args.dataloader_prefetch_factor or PREFETCH_FACTOR
        self._draws = Draws(args.seed, collator)
        if n_workers and self._draws.own:
            raise draws_in_threads(n_workers)
        source = Source(pieces=self._pieces, make=self._make, end=self._end, begin=self._begin)
        self._prefetcher = Prefetcher(source, n_workers, n_workers * factor)

    def take(self, plan_step: int) -> list[Batch]:
        return self._prefetcher.take(plan_step)

    def sample(self, plan_step: int) -> np.ndarray:
        return self._order.rows(plan_step)

    def begins_epoch(self, plan_step: int) -> bool:
        return plan_step % self._order.steps_per_epoch == 0

    def ends_epoch(self, plan_step: int) -> bool:
        return plan_step % self._order.steps_per_epoch == 0

    def skip_epoch(self, plan_step: int) -> None:
        self.n_left_out += -plan_step % self._order.steps_per_epoch

    def epochs_done(self, plan_step: int) -> float:
        return self._order.epoch(plan_step)

    def state(self) -> State:
        return {"n_left_out": self.n_left_out}

    def load_state(self, saved: State) -> None:
        schema.require_all(saved, {"n_left_out": schema.count}, "loader")
        self.n_left_out = saved["n_left_out"]

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._prefetcher.close()

    def _pieces(self, plan_step: int) -> list[Piece]:
        """Return the micro-batches of a step: rows, position of the first in the step, padded lengths."""
        return pieces_of(self._run, self._run.train_dataset, self._order.rows(plan_step), self.micro_rows)

    def _begin(self, plan_step: int, piece: Piece) -> None:
        self._draws.begin(plan_step, piece[1])

    def _make(self, rows: np.ndarray, first_slot: int, padded_to: np.ndarray | None, is_extra: bool) -> Batch:
        batch = self._run.objective.batch(self._run.train_dataset, rows, first_slot, padded_to)
        batch = replace(batch, rows=rows, is_extra=is_extra)
        return batch.pinned() if self._pinned else batch

    def _end(self, plan_step: int) -> int:
        """Return the step at which reading ahead stops: the end of the epoch, or of the run."""
        n_steps, per_epoch = self._run.plan.n_steps, self._order.steps_per_epoch
        if self._run.args.dataloader_persistent_workers:
            return n_steps
        return min(n_steps, (plan_step // per_epoch + 1) * per_epoch)


def make_plan(trainer: PublicTrainer) -> plan.RunPlan:
    """Return the plan of the run."""
    args = trainer.args
    if dataloaders.is_sized(trainer.train_dataset):
        return plan.make(args, trainer.train_dataset)
    streams.require_readable(trainer)
    streams.require_steps(args)
    per_epoch = args.max_steps
    return plan.from_order(args, StreamOrder(per_epoch), plan.n_steps_of(args, per_epoch), "as the source gives them")


def build(run: Run, sync: Sync, collator: Any = None) -> Loader:
    """Return the loader of this run. The generators that `collator` keeps for itself are seeded before each batch."""
    args, micro_rows = run.args, run.args.per_device_train_batch_size
    if not isinstance(run.plan.order, StreamOrder):
        if args.ignore_data_skip:
            logger.info("ignore_data_skip changes nothing: a resumed run continues with the next row at no cost")
        return PlannedLoader(run, collator)
    source = streams.RowSource(run, micro_rows, Draws(args.seed, collator), sync)
    return streams.StreamLoader(source, None, run.plan.n_steps, micro_rows, reads_again=not args.ignore_data_skip)
