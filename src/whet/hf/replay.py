"""Batches that come again: what samplers, data sets and collators draw follows from seed, epoch and batch.

A loop that resumes within an epoch skips the batches before, or reads them again. Either way the rows after them draw
the numbers that they drew before the stop, and those of the loop itself, such as dropout masks, do not move.

The order of rows follows from one seed of all ranks and the epoch, whatever the sampler's class. Each rank runs the
sampler and keeps its share of the batches: with numbers of each rank's own, rows would be trained twice or never.

The generators that everybody shares are those of the process. Trainings in its threads take turns (`one_at_a_time`);
what else a thread draws while a batch is made is drawn from the numbers of this batch.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import accelerate
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from whet.engine.draws import Draws
from whet.errors import ConfigError, DataError
from whet.hf import between_ranks
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.on_host import sent_batch
from whet.store import schema
from whet.store.compare import digest_of_rows
from whet.store.state import State
from whet.system import after_fork

_INSIDE = ("batch_sampler", "sampler")
"""Attributes under which samplers hold the samplers that they read."""
_SITE = 0x0DE2
"""Makes the random numbers of the order differ from those of the batches."""
_APART = 1_000_003
"""How far apart the numbers are under which accelerate's sampler draws the same epoch again."""


# ---- trainings in threads ----

_turn = threading.RLock()
"""Whose thread has it, trains."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread of this process trains, and let the others wait within the block."""
    _leave_turn_to_parent()
    turn = _turn
    if not turn.acquire(blocking=False):
        logger.warning(
            "this training waits for one in another thread, which draws from the same random generators: start it in a"
            " process of its own to train at the same time"
        )
        turn.acquire()
    try:
        yield
    finally:
        turn.release()


@cache
def _leave_turn_to_parent() -> None:
    after_fork(_forget_turn)


def _forget_turn() -> None:
    """Let a forked child train: the thread that trains is its parent's."""
    global _turn
    _turn = threading.RLock()


# ---- before accelerate prepares a loader ----


def give_generator(loader: Any) -> None:
    """Give a loader without a generator one of its own.

    A loader draws a number whenever it begins an epoch. From torch's own generator, that would shift the dropout masks
    of a run that resumes within an epoch.
    """
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.random.initial_seed() % 2**63)


def seed_of_order(loader: Any, asked: int | None, *, stateful: bool) -> int:
    """Return the seed of the order of rows: the one asked for, that of the loader's generator, or torch's on rank 0.

    accelerate takes each rank's own seed, and ranks that were seeded differently would deal out different orders.
    Raises ConfigError for loaders whose order would be lost.
    """
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            what="the loader has batch_size=None, and accelerate cannot prepare it",
            got=f"sampler {type(loader.sampler).__name__}",
            why="accelerate deals out the batches of a batch sampler; it would lose this sampler, or raise a TypeError",
            fix="give the sampler of batches as batch_sampler=, or a batch_size",
        )
    if stateful and loader.num_workers and not isinstance(loader.sampler, SequentialSampler):
        raise ConfigError(
            what="use_stateful_dataloader would resume with other rows",
            got=f"num_workers={loader.num_workers}, sampler {type(loader.sampler).__name__}",
            why="accelerate starts the workers before it gives the loader its order, and a resumed one has another",
            fix="leave use_stateful_dataloader out, and resume with set_epoch and skip_first_batches; or num_workers=0",
        )
    own = torch.random.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    return between_ranks.of_first((own if asked is None else asked) % 2**63, schema.whole)


# ---- after it did ----


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
    if n_batches:  # the rest of an epoch that has begun
        place.turns.begun = False
    _give(inside, Place(skipping, place.draws, place.order, n_skipped, prepared, place.first, place.turns))


def place_of(prepared: Any) -> Place | None:
    """Return the place of a prepared loader; None if `replay` has not seen it."""
    return getattr(getattr(prepared, "base_dataloader", None), "whet_place", None)


def _give(inside: Any, place: Place) -> None:
    if type(inside) is DataLoader:
        inside.__class__ = Replayed
        inside.whet_place = place


@dataclass
class Turns:
    """How often an epoch has been begun: a loop that leaves it early begins it again, with other draws."""

    epoch: int = -1
    """The last epoch that was begun."""
    number: int = 0
    """How often it had been begun before."""
    begun: bool = False
    """Whether the next beginning is another turn, and not the rest of this one, as after a resume."""
    left: bool = False
    """Whether this turn gives no more batches: a loop whose loader has not begun its next epoch since has left it."""

    def begin(self, epoch: int) -> int:
        """Return the number of the turn that begins."""
        self.number = self.number + self.begun if epoch == self.epoch else 0
        self.epoch, self.begun, self.left = epoch, True, False
        return self.number


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
    turns: Turns = field(default_factory=Turns)

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of the owner's epoch, each with random numbers of its own."""
        epoch, number, generator = int(self.owner.iteration), self.n_skipped, loader.generator
        end = object()  # a batch may be None
        turn = self.turns.begin(epoch)
        with self.draws.apart(epoch << 32, turn):
            if generator is not None:
                generator.manual_seed(torch.initial_seed() % 2**63)
            found = begin()
        while True:
            number += 1
            with self.draws.apart(epoch << 32 | number, turn):
                batch = next(found, end)
            if batch is end:  # accelerate reads one batch ahead, and the loop may leave with the one that it has
                self._end(epoch, turn)
                break
            if number == 1 and not turn and isinstance(loader.dataset, IterableDataset):
                self._compare(epoch, batch)
            try:
                yield self._sent(batch)
            except GeneratorExit:
                self._end(epoch, turn)
                raise
        if self.origin is not None:
            self.origin.iteration = epoch + 1

    def _end(self, epoch: int, turn: int) -> None:
        """Note that the iterator of a turn has ended, which may be after another turn has begun."""
        self.turns.left = (epoch, turn) == (self.turns.epoch, self.turns.number)

    def _sent(self, batch: Any) -> Any:
        """Return a batch that accelerate would move to a GPU, moved already, and without waiting for the GPU."""
        device = getattr(self.owner, "device", None)
        if not isinstance(self.owner, accelerate.data_loader.DataLoaderShard) or device is None:
            return batch
        return sent_batch(batch, torch.device(device))

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


# ---- the order of rows ----


class Order:
    """What the samplers of a prepared loader draw from."""

    def __init__(self, seed: int, sampler: Any) -> None:
        self._samplers = list(_chain(sampler))
        self._draws = Draws(seed, *self._samplers)
        seeds = [seed for _, seed in self._draws.own]
        # ranks may have seeded theirs differently
        self._give(between_ranks.of_first(seeds, schema.list_of(schema.whole)))

    def state(self) -> State:
        """Return the seeds of the order."""
        return {"seed": self._draws.seed, "own": [seed for _, seed in self._draws.own]}

    def load_state(self, saved: State) -> None:
        """Restore what `state` returned."""
        self._draws.seed = int(saved["seed"])
        self._give(saved["own"])

    def _give(self, seeds: list[int]) -> None:
        pairs = zip(self._draws.own, seeds, strict=True)
        self._draws.own = [(generator, int(seed)) for (generator, _), seed in pairs]

    def items(self, sampler: Any, epoch: int, turn: int = 0) -> Iterator[Any]:
        """Yield what the sampler yields in this turn of the epoch; the generators that everybody shares stay."""
        for one in self._samplers:
            if hasattr(one, "set_epoch"):  # accelerate's draws from the sum of its seed and this number, of 32 bits
                one.set_epoch(epoch + turn * _APART if hasattr(one, "initial_seed") else epoch)
        found, states, end = iter(sampler), None, object()
        while True:
            with generators_kept():
                if states is None:
                    self._draws.begin(epoch, _SITE | turn << 16)
                else:
                    _set_states(states)
                item = next(found, end)
                states = _states()
            if item is end:
                return
            yield item


class Indices:
    """The sampler of a loader, in the order of the loader's present epoch."""

    def __init__(self, sampler: Any, place: Any) -> None:
        self.sampler, self._place = sampler, place

    def __iter__(self) -> Iterator[Any]:
        """Yield the row numbers of each batch."""
        place = self._place
        return place.order.items(self.sampler, int(place.owner.iteration), place.turns.number)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.sampler)


def _chain(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it reads, the outermost first."""
    seen: list[Any] = []
    left = [sampler]
    while left:
        one = left.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        left += [getattr(one, name, None) for name in _INSIDE]


def _states() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# ---- where a loader stands ----


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of a prepared loader that draws from a seed; None: it has none."""
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None:
        sampler = getattr(batches, "sampler", None)
        if hasattr(sampler, "initial_seed"):
            return sampler
        batches = getattr(batches, "batch_sampler", None)
    return None


def state_of(loader: Any) -> State:
    """Return in which epoch a prepared loader is, the seed of its order and the state of its generator."""
    found: State = {"iteration": int(getattr(loader, "iteration", 0))}
    if (sampler := _sampler_of(loader)) is not None:
        found["seed"] = int(sampler.initial_seed)
    if (place := place_of(loader)) is not None:
        epoch, digest = place.first
        found["draws"] = {"seed": place.draws.seed, "epoch": epoch, "first": digest}
        turns = place.turns if place.turns.epoch == found["iteration"] else Turns()
        found |= {"turn": turns.number, "left": turns.left}
        found["order"] = place.order.state()
    if getattr(loader, "use_stateful_dataloader", False):
        found["position"] = loader.state_dict()
    generator = getattr(loader, "generator", None)
    return found if generator is None else found | {"generator": generator.get_state()}


def load_state(loader: Any, saved: State) -> None:
    """Restore what `state_of` returned."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(int(saved["iteration"]))
    if (sampler := _sampler_of(loader)) is not None and "seed" in saved:
        sampler.initial_seed = int(saved["seed"])
    if (place := place_of(loader)) is not None and "draws" in saved:
        place.order.load_state(saved["order"])
        place.draws.seed = int(saved["draws"]["seed"])
        place.turns = Turns(int(saved["iteration"]), int(saved.get("turn", 0)), bool(saved.get("left", False)))
        if accelerate.PartialState().is_main_process:  # the checksum is of its batch
            place.first = (int(saved["draws"]["epoch"]), saved["draws"]["first"])
    if "position" in saved:
        loader.load_state_dict(saved["position"])
    generator = getattr(loader, "generator", None)
    if generator is not None and "generator" in saved:
        generator.set_state(saved["generator"])
