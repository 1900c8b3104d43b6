"""The batches of a run: from the steps of its plan to the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from whet.config.rules.loading import PREFETCH_FACTOR
from whet.data import budget
from whet.data.batch import Batch
from whet.data.prefetch import Piece, Prefetcher, Source
from whet.log import logger
from whet.train.batches import plan, streams
from whet.train.compat import dataloaders
from whet.train.resume import kinds
from whet.train.state import State

if TYPE_CHECKING:
    from whet.train.loop import Fit
    from whet.train.trainer import Trainer


class Loader(Protocol):
    """The batches of each step, and where its epochs begin and end. `place` counts the steps of the plan."""

    def take(self, place: int) -> list[Batch]:
        """Return the batches of this step; none if there are no more rows."""
        ...

    def sample(self, place: int) -> np.ndarray | Batch:
        """Return rows of the training set, or a batch, that stand for the step to come."""
        ...

    def begins_epoch(self, place: int) -> bool:
        """Return whether this step is an epoch's first."""
        ...

    def ends_epoch(self, place: int) -> bool:
        """Return whether the step before this one was an epoch's last."""
        ...

    n_left_out: int
    """Steps of epochs that a callback ended early."""

    def leave_epoch(self, place: int) -> None:
        """Go to the next epoch; the steps of this one that remain are left out."""
        ...

    def epochs_done(self, place: int) -> float:
        """Return how many epochs are done before this step."""
        ...

    def state(self) -> State:
        """Return where the run is in its data, as far as the step's number does not say it."""
        ...

    def load_state(self, saved: State) -> None:
        """Take back what `state` returned; nothing is read before `open`."""
        ...

    def open(self) -> None:
        """Go to where the saved state was; DataError if the source does not give the same rows again."""
        ...

    def close(self) -> None:
        """End the threads and let go of the data."""
        ...


@dataclass(frozen=True)
class StreamOrder:
    """The length of an epoch whose rows have no numbers; of the run where nobody knows it."""

    steps_per_epoch: int


class PlannedLoader:
    """Batches of numbered rows, by the order of the plan: any step's at any time."""

    def __init__(self, prefetcher: Prefetcher, order: Any) -> None:
        self._prefetcher, self._order = prefetcher, order
        self.n_left_out = 0

    def take(self, place: int) -> list[Batch]:
        return self._prefetcher.take(place)

    def sample(self, place: int) -> np.ndarray:
        return self._order.rows(place)

    def begins_epoch(self, place: int) -> bool:
        return place % self._order.steps_per_epoch == 0

    def ends_epoch(self, place: int) -> bool:
        return place % self._order.steps_per_epoch == 0

    def leave_epoch(self, place: int) -> None:
        self.n_left_out += -place % self._order.steps_per_epoch

    def epochs_done(self, place: int) -> float:
        return self._order.epoch(place)

    def state(self) -> State:
        return {"n_left_out": self.n_left_out}

    def load_state(self, saved: State) -> None:
        kinds.require_all(saved, {"n_left_out": kinds.count}, "loader")
        self.n_left_out = saved["n_left_out"]

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._prefetcher.close()


def reads_a_stream(trainer: Trainer) -> bool:
    """Return whether the run's rows come in an order of their own: of an iterable data set or of the user's loader."""
    return dataloaders.decides_batches(trainer) or not dataloaders.is_sized(trainer.train_dataset)


def make_plan(trainer: Trainer) -> plan.RunPlan:
    """Return the plan of the run; `events.train_dataloader` is the loader that callbacks see, and the user's own."""
    args = trainer.args
    trainer.events.train_dataloader = loader = trainer.get_train_dataloader()
    if not reads_a_stream(trainer):
        return plan.make(args, trainer.train_dataset)
    streams.require_readable(trainer)
    per_epoch = streams.steps_in(loader, args.gradient_accumulation_steps)
    if per_epoch is None or not dataloaders.decides_batches(trainer):
        streams.require_steps(args)
        per_epoch = args.max_steps
    n_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return plan.of(args, StreamOrder(per_epoch), n_steps, "as the source gives them")


def build(fit: Fit) -> Loader:
    """Return what makes the batches of this run, in as many threads as its arguments ask for."""
    if isinstance(fit.plan.order, StreamOrder):
        return _stream(fit)
    return PlannedLoader(_prefetcher(fit), fit.plan.order)


def _stream(fit: Fit) -> streams.StreamLoader:
    trainer, args = fit.trainer, fit.args
    if not dataloaders.decides_batches(trainer):
        source = streams.RowSource(trainer, args.per_device_train_batch_size)
        return streams.StreamLoader(source, None, fit.plan.n_steps)
    loader = trainer.events.train_dataloader
    per_epoch = streams.steps_in(loader, args.gradient_accumulation_steps)
    return streams.StreamLoader(streams.LoaderSource(trainer, loader), per_epoch, fit.plan.n_steps)


def _prefetcher(fit: Fit) -> Prefetcher:
    args, trainer, n_workers = fit.args, fit.trainer, fit.args.dataloader_num_workers
    pinned = trainer.device.type == "cuda" and args.dataloader_pin_memory is not False
    if args.dataloader_pin_memory and not pinned:
        logger.warning(
            "dataloader_pin_memory does nothing here: pinned memory speeds up copies to a GPU, and none is used"
        )

    def pieces(place: int) -> list[Piece]:
        rows = fit.plan.order.rows(place)
        cuts = budget.cuts(trainer.train_dataset, rows, fit.micro_rows, args.max_tokens_per_batch)
        lengths = budget.padded_to(
            trainer.train_dataset, rows, cuts, args.per_device_train_batch_size, trainer.objective.padding
        )
        return [(rows[first:last], first, lengths[n]) for n, (first, last) in enumerate(cuts)]

    def make(rows: np.ndarray, first_slot: int, padded_to: np.ndarray | None) -> Batch:
        batch = trainer.objective.batch(trainer.train_dataset, rows, first_slot, padded_to)
        return batch.pinned() if pinned else batch

    def end(place: int) -> int:
        n_steps, per_epoch = fit.plan.n_steps, fit.plan.order.steps_per_epoch
        return n_steps if args.dataloader_persistent_workers else min(n_steps, (place // per_epoch + 1) * per_epoch)

    factor = args.dataloader_prefetch_factor or PREFETCH_FACTOR
    return Prefetcher(Source(pieces=pieces, make=make, end=end), n_workers, n_workers * factor)
