"""Prefetching: threads prepare batches while the model computes on earlier ones.

Threads, not processes: a fork of a process with threads (OpenMP's, a tokenizer's) may deadlock on their locks, and a
new process would import the program again and need a copy of the data set. Preparing a packed batch copies arrays in
numpy, and the model's products release Python's lock, so both run at the same time. The data set must allow concurrent
reads of rows. It must not draw random numbers, because the model's masks come from the same generators and the order
of the draws would be random. The first step of a run is prepared in the main thread to detect this; a data set that
draws only for later rows is not detected.
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
    hurts="When batches are cheap to make: threads take time from the model.",
    source="torch.utils.data of PyTorch",
    page="speed.md#loading-in-advance",
)

Piece = tuple[Any, ...]
"""The source of a micro-batch: its rows, the index of the first in its step, and other arguments of its maker."""
Job = Callable[[], Batch]
NAME = "whet-data"
"""Prefix of the threads' names."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The plan from which batches are made."""

    pieces: Callable[[int], Sequence[Piece]]
    """Step of the plan -> its micro-batches."""
    make: Callable[..., Batch]
    """Piece -> batch."""
    end: Callable[[int], int]
    """Step of the plan -> the first later one that must not be prepared during that step."""


class Prefetcher:
    """The batches of each step: the same ones, in the same order, for any number of workers.

    Up to `n_ahead` batches are ready or in progress.
    """

    def __init__(self, source: Source, n_workers: int, n_ahead: int) -> None:
        self.source = source
        self.n_workers, self.n_ahead = n_workers, n_ahead
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        """(step, future of a batch), in order."""
        self._jobs: Iterator[tuple[int, Job]] = iter(())
        self._next: int | None = None
        """The first step that is being prepared; None if there is none."""
        self._watched = False

    def take(self, place: int) -> list[Batch]:
        """Return the batches of this step of the plan; an error of a worker is raised at its own step.

        Usually this is the step after the last one taken. For any other step, prepared batches are discarded.
        """
        if self._watched:
            self._go_to(place)
            batches = self._take_prepared(place)
        else:
            batches = self._make_and_check_draws(place)
        if place + 1 < self.source.end(place):
            self._go_to(place + 1)
        else:
            self.close()
        return batches

    def close(self) -> None:
        """Discard prepared batches and end the threads; a thread finishes its current batch."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._jobs, self._next = iter(()), None
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _make_and_check_draws(self, place: int) -> list[Batch]:
        before = _generators()
        batches = [self.source.make(*piece) for piece in self.source.pieces(place)]
        if _generators() != before:
            raise draws_in_threads(self.n_workers)
        self._watched = True
        return batches

    def _take_prepared(self, place: int) -> list[Batch]:
        batches = []
        while self._ahead and self._ahead[0][0] == place:
            _, future = self._ahead.popleft()
            self._fill()
            batches.append(future.result())
        return batches

    def _go_to(self, place: int) -> None:
        """Prepare the batches from this step on."""
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
        """Yield (step, function that makes one of its batches); if a step cannot be split, a function that raises."""
        for place in range(first, self.source.end(first)):
            try:
                pieces = self.source.pieces(place)
            except Exception as error:
                yield place, partial(_fail, error)
                return
            for piece in pieces:
                yield place, partial(self.source.make, *piece)


def draws_in_threads(n_workers: int) -> ConfigError:
    """Return the refusal of threads for batches that draw random numbers."""
    return ConfigError(
        what="this data set does not work with dataloader_num_workers",
        got=f"dataloader_num_workers={n_workers}, and a batch that drew random numbers",
        why="drawn in threads, random numbers have another order in each run, and so do dropout masks",
        fix="use --dataloader_num_workers 0, or draw from a generator seeded with the row's number",
    )


def _fail(error: Exception) -> Batch:
    raise error


def _generators() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    numpy = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()  # pyright: ignore
