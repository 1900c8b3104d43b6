"""Batches made ahead in threads: the same ones in the same order, no more than asked for, errors in their place."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny import tiny_rows
from whet import ConfigError
from whet.data.batch import Batch, pack
from whet.data.prefetch import NAME, Piece, Prefetcher, Source

_ROWS = tiny_rows(64)
_PER_STEP, _PER_BATCH, _STEPS = 8, 2, 6


def _pieces(place: int) -> list[Piece]:
    rows = np.arange(place * _PER_STEP, (place + 1) * _PER_STEP)
    return [(rows[first : first + _PER_BATCH], first) for first in range(0, _PER_STEP, _PER_BATCH)]


def _make(rows: np.ndarray, first_slot: int) -> Batch:
    return pack(_ROWS.take(rows), first_slot=first_slot, position_offset=0)


def _plain(place: int) -> list[Batch]:
    return [_make(*piece) for piece in _pieces(place)]


def _source(make: Callable[[np.ndarray, int], Batch] = _make, end: int = _STEPS) -> Source:
    return Source(pieces=_pieces, make=make, end=lambda _: end)


def _told(batches: list[Batch]) -> list[tuple[int, list[int]]]:
    return [(batch.first_slot, batch.inputs["input_ids"][0].tolist()) for batch in batches]


def _workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.fixture(autouse=True)
def _ends_its_threads() -> None:
    """Each test starts without workers; each asserts for itself that none is left."""
    assert _workers() == []


@pytest.mark.parametrize(("n_workers", "n_ahead"), [(1, 1), (2, 4), (3, 40)])
def test_prefetched_batches_are_the_same_in_the_same_order(n_workers: int, n_ahead: int) -> None:
    def slowly(rows: np.ndarray, first_slot: int) -> Batch:
        time.sleep(0.003 * (first_slot % 3))  # those behind are ready first
        return _make(rows, first_slot)

    loader = Prefetcher(_source(slowly), n_workers, n_ahead)
    for place in range(_STEPS):
        assert _told(loader.take(place)) == _told(_plain(place))
    assert _workers() == []  # the plan's end is theirs


def test_prefetch_respects_its_limit() -> None:
    made: list[int] = []

    def counted(rows: np.ndarray, first_slot: int) -> Batch:
        made.append(int(rows[0]))
        return _make(rows, first_slot)

    loader = Prefetcher(_source(counted), 2, 3)
    taken = 0
    for place in range(_STEPS - 1):
        taken += len(loader.take(place))
        deadline = time.monotonic() + 30
        while len(made) < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(made) == taken + 3
    loader.close()
    assert _workers() == []


def test_worker_error_is_raised_unchanged_at_its_step() -> None:
    class OddRowError(Exception):
        pass

    def odd(rows: np.ndarray, first_slot: int) -> Batch:
        if rows[0] == 3 * _PER_STEP + _PER_BATCH:
            raise OddRowError("row 26 is odd")
        return _make(rows, first_slot)

    loader = Prefetcher(_source(odd), 2, 40)
    for place in range(3):
        assert len(loader.take(place)) == 4
    with pytest.raises(OddRowError, match="row 26 is odd"):
        loader.take(3)
    loader.close()
    assert _workers() == []


def test_step_that_cannot_be_split_fails_at_its_turn() -> None:
    def pieces(place: int) -> list[Piece]:
        if place == 2:
            raise KeyError("length")
        return _pieces(place)

    loader = Prefetcher(replace(_source(), pieces=pieces), 2, 40)
    assert [len(loader.take(place)) for place in (0, 1)] == [4, 4]
    with pytest.raises(KeyError, match="length"):
        loader.take(2)
    loader.close()


def test_jumping_to_another_step_discards_prepared_batches() -> None:
    loader = Prefetcher(_source(), 2, 6)
    for place in (0, 1, 4, 2, 3):
        assert _told(loader.take(place)) == _told(_plain(place))
    loader.close()
    assert _workers() == []


def test_closing_does_not_wait_for_pending_batches() -> None:
    begun: list[int] = []
    go_on = threading.Event()

    def waiting(rows: np.ndarray, first_slot: int) -> Batch:
        if rows[0] >= _PER_STEP:
            begun.append(int(rows[0]))
            go_on.wait(30)
        return _make(rows, first_slot)

    loader = Prefetcher(_source(waiting), 1, 20)
    loader.take(0)
    while not begun:
        time.sleep(0.001)
    threading.Timer(0.05, go_on.set).start()
    loader.close()
    assert begun == [_PER_STEP]
    assert _workers() == []


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_data_set_that_draws_random_numbers_is_refused(draw: Callable[[], object]) -> None:
    def drawing(rows: np.ndarray, first_slot: int) -> Batch:
        draw()
        return _make(rows, first_slot)

    with pytest.raises(ConfigError, match="does not work with dataloader_num_workers"):
        Prefetcher(_source(drawing), 1, 2).take(0)
    assert _workers() == []
