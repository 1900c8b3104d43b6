"""Batches made ahead, in threads, while the model computes on those before them.

Threads, not processes. A fork of a process that has threads already (OpenMP's, a tokenizer's) may find their locks
held for ever; a new process would read the program anew and need a copy of the data set. Making a packed batch is
copying in numpy, and the model's products let go of Python's lock: there is room beside them. What a data set in
threads has to stand: several rows asked for at once. What it may not do: draw random numbers, as the model's masks come
from the same generators, and the order of the draws would be chance. The first step of a run is made in the main
thread, and tells whether it does; a data set that draws for some later rows only is not found out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from whet.card import Card
from whet.data.batch import Batch
from whet.errors import ConfigError

CARD = Card(
    name="loading in advance",
    asked_by="dataloader_num_workers, dataloader_pin_memory",
    does="Threads prepare the next batches while the model computes, in pinned memory for a GPU.",
    improves="speed",
    same_result="yes",
    hurts="When batches are cheap to make: the threads take time from the model on a CPU.",
    source="torch.utils.data of PyTorch",
    page="loading.md",
)

Piece = tuple[Any, ...]
"""What a micro-batch is made from: its rows, the place of the first in its step, and whatever else its maker takes."""
Job = Callable[[], Batch]
NAME = "whet-data"
"""How the threads' names begin."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What batches are made from."""

    pieces: Callable[[int], Sequence[Piece]]
    """Step of the plan -> its micro-batches."""
    make: Callable[..., Batch]
    """Piece -> batch."""
    end: Callable[[int], int]
    """Step of the plan -> the first one behind it that is not to be made ahead while that one is on."""


class Prefetcher:
    """The batches of each step: the same ones, in the same order, for any number of workers.

    Without workers a batch is made when it is taken; with some, up to `n_ahead` batches are ready or in the making.
    """

    def __init__(self, source: Source, n_workers: int, n_ahead: int) -> None:
        self.source = source
        self.n_workers, self.n_ahead = n_workers, n_ahead
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        """(step, batch to be), in order."""
        self._jobs: Iterator[tuple[int, Job]] = iter(())
        self._next: int | None = None
        """The step that is being made ahead first; None while nothing is."""
        self._watched = False

    def take(self, place: int) -> list[Batch]:
        """Return the batches of this step of the plan; an error of a worker is raised at its own step.

        Usually that of the step behind the last one taken. For any other, what was made ahead is thrown away.
        """
        if self.n_workers == 0:
            return self._made_here(place)
        if self._watched:
            self._go_to(place)
            batches = self._made_ahead(place)
        else:
            batches = self._made_under_watch(place)
        if place + 1 < self.source.end(place):
            self._go_to(place + 1)
        else:
            self.close()
        return batches

    def close(self) -> None:
        """Throw away what was made ahead and end the threads; those that are making a batch finish it."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._jobs, self._next = iter(()), None
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _made_here(self, place: int) -> list[Batch]:
        return [self.source.make(*piece) for piece in self.source.pieces(place)]

    def _made_under_watch(self, place: int) -> list[Batch]:
        before = _generators()
        batches = self._made_here(place)
        if _generators() != before:
            raise ConfigError(
                what="this data set does not go with dataloader_num_workers",
                got=f"dataloader_num_workers={self.n_workers}, and a batch that drew random numbers",
                why="drawn in threads, they come in another order in each run, and so do the masks of dropout",
                fix="use --dataloader_num_workers 0, or draw from a generator made from the row's number",
            )
        self._watched = True
        return batches

    def _made_ahead(self, place: int) -> list[Batch]:
        batches = []
        while self._ahead and self._ahead[0][0] == place:
            _, future = self._ahead.popleft()
            self._fill()
            batches.append(future.result())
        return batches

    def _go_to(self, place: int) -> None:
        """Have the batches from this step on made ahead."""
        waiting = self._ahead[0][0] if self._ahead else self._next
        if waiting != place:
            for _, future in self._ahead:
                future.cancel()
            self._ahead.clear()
            self._jobs, self._next = self._jobs_from(place), place
        self._fill()

    def _fill(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.n_workers, thread_name_prefix=NAME)
        while len(self._ahead) < self.n_ahead:
            place, job = next(self._jobs, (-1, None))
            if job is None:
                return
            self._ahead.append((place, self._pool.submit(job)))

    def _jobs_from(self, first: int) -> Iterator[tuple[int, Job]]:
        """Yield (step, what makes one of its batches), to the end; where a step cannot be cut, what says so."""
        for place in range(first, self.source.end(first)):
            try:
                pieces = self.source.pieces(place)
            except Exception as error:
                yield place, partial(_fail, error)
                return
            for piece in pieces:
                yield place, partial(self.source.make, *piece)


def _fail(error: Exception) -> Batch:
    raise error


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators that everybody shares."""
    numpy = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()  # pyright: ignore
