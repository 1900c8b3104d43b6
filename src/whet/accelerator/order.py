"""The order of rows: what samplers draw follows from one seed of all ranks and the epoch, whatever their class.

Each rank runs the sampler and keeps its share of the batches. With numbers of each rank's own, rows would be trained
twice or never; and a loop that resumes within an epoch would skip batches of another order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from whet.accelerator import between_ranks
from whet.kernels.random import generators_kept
from whet.train.batches.draws import Draws
from whet.train.resume import schema
from whet.train.state import State

_INSIDE = ("batch_sampler", "sampler")
"""Attributes under which samplers hold the samplers that they read."""


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

    def items(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Yield what the sampler yields in this epoch; the generators that everybody shares stay as they are."""
        for one in self._samplers:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        found, states, end = iter(sampler), None, object()
        while True:
            with generators_kept():
                if states is None:
                    self._draws.begin(epoch, _SITE)
                else:
                    _set_states(states)
                item = next(found, end)
                states = _states()
            if item is end:
                return
            yield item


_SITE = 0x0DE2
"""Makes the random numbers of the order differ from those of the batches."""


class Indices:
    """The sampler of a loader, in the order of the loader's present epoch."""

    def __init__(self, sampler: Any, place: Any) -> None:
        self.sampler, self._place = sampler, place

    def __iter__(self) -> Iterator[Any]:
        """Yield the row numbers of each batch."""
        return self._place.order.items(self.sampler, int(self._place.owner.iteration))

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
