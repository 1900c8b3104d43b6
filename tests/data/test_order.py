"""Which rows make which step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data import order as sampling
from whet.data.order import StepOrder

quick = settings(max_examples=40, deadline=None, derandomize=True)
sizes = {"n_rows": st.integers(1, 60), "rows_per_batch": st.integers(1, 20), "seed": st.integers(0, 2**64 - 1)}


def order_of(n_rows: int, rows_per_batch: int, seed: int, *, shuffle: bool = True, **changes: object) -> StepOrder:
    """Return an order of this many rows, shuffled or as they stand."""
    epochs = sampling.shuffled(n_rows, seed) if shuffle else sampling.sequential(n_rows)
    return StepOrder(epochs=epochs, n_rows=n_rows, rows_per_batch=rows_per_batch, **changes)  # pyright: ignore[reportArgumentType]


def epoch_of(order: StepOrder, epoch: int) -> list[np.ndarray]:
    """Return the rows of each step of one epoch."""
    return [order.rows(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]


@quick
@given(**sizes, batches=st.integers(1, 4), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_epoch_visits_each_row_once(
    n_rows: int, rows_per_batch: int, seed: int, batches: int, epoch: int, shuffle: bool
) -> None:
    order = order_of(n_rows, rows_per_batch, seed, shuffle=shuffle, batches_per_step=batches)
    steps = epoch_of(order, epoch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(n_rows))
    assert {len(step) for step in steps[:-1]} <= {rows_per_batch * batches}
    assert 1 <= len(steps[-1]) <= rows_per_batch * batches


@quick
@given(**sizes, batches=st.integers(1, 4), epoch=st.integers(0, 3))
def test_drop_last_drops_only_a_short_batch(
    n_rows: int, rows_per_batch: int, seed: int, batches: int, epoch: int
) -> None:
    """The rows that stay come in the same order; the last step takes the batches that remain."""
    kept = order_of(n_rows, rows_per_batch, seed, batches_per_step=batches)
    dropped = order_of(n_rows, rows_per_batch, seed, batches_per_step=batches, drop_last=True)
    rows = np.concatenate(epoch_of(dropped, epoch)).tolist()
    assert rows == np.concatenate(epoch_of(kept, epoch)).tolist()[: n_rows // rows_per_batch * rows_per_batch]
    assert dropped.batches_per_epoch == n_rows // rows_per_batch
    assert dropped.steps_per_epoch == max(-(-dropped.batches_per_epoch // batches), 1)


def test_last_step_of_an_epoch_is_short() -> None:
    order = order_of(10, 4, 0)
    assert [len(order.rows(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [order.epoch(step) for step in (0, 3, 6)] == [0, 1, 2]
    assert order.epoch(1) == pytest.approx(1 / 3)


def test_epoch_counts_batches_as_transformers_does() -> None:
    """7 batches of 2 rows: the first of two steps takes 4 of them."""
    order = order_of(13, 2, 0, batches_per_step=4)
    assert [order.epoch(step) for step in range(4)] == pytest.approx([0, 4 / 7, 1, 1 + 4 / 7])
    dropping = order_of(13, 2, 0, batches_per_step=4, drop_last=True)
    assert [len(dropping.rows(step)) for step in range(2)] == [8, 4]
    assert dropping.epoch(1) == pytest.approx(4 / 6)


def test_order_of_rows_matches_the_permutation() -> None:
    order = order_of(5, 2, 3, shuffle=False)
    assert [order.rows(step).tolist() for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


@quick
@given(**sizes, asked=st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_rows_of_a_step_depend_only_on_its_number(
    n_rows: int, rows_per_batch: int, seed: int, asked: list[int]
) -> None:
    """Not on what was asked before: a resumed run, which begins in the middle, sees the same rows."""
    order = order_of(n_rows, rows_per_batch, seed)
    once = {step: order.rows(step).tolist() for step in asked}
    for step in reversed(asked):
        assert order_of(n_rows, rows_per_batch, seed).rows(step).tolist() == once[step]


def test_another_process_has_the_same_order() -> None:
    code = "from whet.data.order import shuffled; print(shuffled(40, 9)(2).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(order_of(40, 40, 9).rows(2).tolist())


def test_seeds_and_epochs_differ() -> None:
    """As in transformers, seed 4 in epoch 3 is seed 3 in epoch 4: ten seeds and ten epochs make 19 orders."""
    orders = {
        (seed, epoch): tuple(order_of(50, 50, seed).rows(epoch).tolist()) for seed in range(10) for epoch in range(10)
    }
    assert len(set(orders.values())) == 19
    assert all(orders[seed, epoch] == orders[0, seed + epoch] for seed, epoch in orders if seed + epoch < 10)
    assert tuple(range(50)) not in orders.values()


def test_every_row_can_come_first() -> None:
    """Over 4000 epochs, each of 8 rows is first 500 times, give or take; five standard deviations are 105."""
    firsts = [order_of(8, 1, 1).rows(8 * epoch)[0] for epoch in range(4000)]
    counts = np.bincount(firsts, minlength=8)
    assert counts.sum() == 4000
    assert np.abs(counts - 500).max() < 105


def test_changing_returned_rows_does_not_change_the_order() -> None:
    order = order_of(12, 4, 5)
    before = order.rows(1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        order.rows(1)[0] = 0
    assert order.rows(1).tolist() == before
