"""Batches that come again: what data sets, samplers and collators draw follows from seed, epoch and batch.

A loop that resumes within an epoch skips the batches before, or reads them again. Either way the rows after them draw
the numbers that they drew before the stop, and those of the loop itself, such as dropout masks, do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from whet.accelerator import between_ranks
from whet.accelerator.order import Indices, Order
from whet.errors import DataError
from whet.train.batches.draws import Draws
from whet.train.resume.fingerprint import digest_of_rows


@dataclass
class Place:
    """Where a prepared loader is, and what its rows draw from."""

    owner: Any
    """The prepared loader, which knows its epoch."""
    draws: Draws
    order: Order
    n_skipped: int = 0
    """Batches of the epoch that are never read; rows of a stream are read, and then dropped."""
    origin: Any = None
    """The loader that the owner skips batches of."""
    first: tuple[int, str | None] = (-1, None)
    """The last epoch of a stream that was begun, and a checksum of its first batch."""

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of the owner's epoch, each with random numbers of its own."""
        epoch, number, generator = int(self.owner.iteration), self.n_skipped, loader.generator
        with self.draws.apart(epoch << 32):
            if generator is not None:
                generator.manual_seed(torch.initial_seed() % 2**63)
            found = begin()
        while True:
            number += 1
            with self.draws.apart(epoch << 32 | number):
                batch = next(found, None)
            if batch is None:
                break
            if number == 1 and isinstance(loader.dataset, IterableDataset):
                self._compare(epoch, batch)
            yield batch
        if self.origin is not None:
            self.origin.iteration = epoch + 1

    def _compare(self, epoch: int, batch: Any) -> None:
        """Keep a checksum of the first batch of an epoch; refuse other rows when the epoch comes again."""
        digest = digest_of_rows([batch])
        if self.first[0] == epoch and self.first[1] not in (None, digest):
            raise DataError(
                what="the data set gives other rows than when this state was saved",
                got=f"the first batch of epoch {epoch}",
                why="a loop that resumes within an epoch reads a stream from its beginning, and needs the same rows",
                fix="use a data set that gives the same rows each time, with set_epoch for another order; or save"
                " between two epochs",
            )
        self.first = (epoch, digest)


class Replayed(DataLoader[Any]):
    """A loader of torch whose batches come again; accelerate has made it, and `replay` gives it a place."""

    whet_place: Place

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators read row numbers from."""
        sampler = super()._index_sampler
        return sampler if isinstance(self.dataset, IterableDataset) else Indices(sampler, self.whet_place)

    def __iter__(self) -> Any:
        """Return the batches of the present epoch."""
        return self.whet_place.batches(self, super().__iter__)


def replay(prepared: Any, seed: int) -> None:
    """Let the batches of a loader that accelerate has prepared come again; `seed` is that of all ranks."""
    between_ranks.dispatch_by_messages(prepared)
    inside = getattr(prepared, "base_dataloader", None)
    if type(inside) is not DataLoader:  # a stateful one knows its place itself, and one for TPUs is another class
        return
    rows = inside.dataset
    holders = (inside.collate_fn, rows, getattr(rows, "dataset", None))  # accelerate may have wrapped the rows
    sampler = None if isinstance(rows, IterableDataset) else inside._index_sampler
    _give(inside, Place(prepared, Draws(seed, *holders), Order(seed, sampler)))


def replay_rest(skipping: Any, prepared: Any, n_batches: int) -> None:
    """Do the same for a loader that leaves the first batches of this one out."""
    place = place_of(prepared)
    if place is None:
        return
    between_ranks.dispatch_by_messages(skipping)
    inside = skipping.base_dataloader
    n_skipped = 0 if isinstance(inside.dataset, IterableDataset) else n_batches
    _give(inside, Place(skipping, place.draws, place.order, n_skipped, prepared, place.first))


def place_of(prepared: Any) -> Place | None:
    """Return the place of a prepared loader; None if `replay` has not seen it."""
    return getattr(getattr(prepared, "base_dataloader", None), "whet_place", None)


def _give(inside: Any, place: Place) -> None:
    if type(inside) is DataLoader:
        inside.__class__ = Replayed
        inside.whet_place = place
