"""Which rows make which step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.order import StepOrder

quick = settings(max_examples=40, deadline=None, derandomize=True)
sizes = {"n_rows": st.integers(1, 60), "rows_per_step": st.integers(1, 20), "seed": st.integers(0, 2**64 - 1)}


def epoch_of(order: StepOrder, epoch: int) -> list[np.ndarray]:
    """Return the rows of each step of one epoch."""
    return [order.rows(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]


@quick
@given(**sizes, epoch=st.integers(0, 3), shuffle=st.booleans())
def test_an_epoch_visits_each_row_once(n_rows: int, rows_per_step: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = StepOrder(n_rows=n_rows, rows_per_step=rows_per_step, seed=seed, shuffle=shuffle)
    steps = epoch_of(order, epoch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(n_rows))
    assert {len(step) for step in steps[:-1]} <= {rows_per_step}
    assert 1 <= len(steps[-1]) <= rows_per_step


@quick
@given(**sizes, epoch=st.integers(0, 3))
def test_drop_last_leaves_out_only_a_short_step(n_rows: int, rows_per_step: int, seed: int, epoch: int) -> None:
    """The steps that stay are the same; a data set smaller than one step is still a step."""
    kept = StepOrder(n_rows=n_rows, rows_per_step=rows_per_step, seed=seed)
    dropped = StepOrder(n_rows=n_rows, rows_per_step=rows_per_step, seed=seed, drop_last=True)
    steps = epoch_of(dropped, epoch)
    assert [step.tolist() for step in steps] == [step.tolist() for step in epoch_of(kept, epoch)[: len(steps)]]
    assert len(steps) == max(n_rows // rows_per_step, 1)
    if n_rows >= rows_per_step:
        assert {len(step) for step in steps} == {rows_per_step}


def test_the_last_step_of_an_epoch_is_short() -> None:
    order = StepOrder(n_rows=10, rows_per_step=4, seed=0)
    assert [len(order.rows(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [order.epoch(step) for step in (0, 3, 6)] == [0, 1, 2]
    assert order.epoch(1) == pytest.approx(1 / 3)


def test_rows_in_their_order() -> None:
    order = StepOrder(n_rows=5, rows_per_step=2, seed=3, shuffle=False)
    assert [order.rows(step).tolist() for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


@quick
@given(**sizes, asked=st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_a_step_depends_on_its_number_alone(n_rows: int, rows_per_step: int, seed: int, asked: list[int]) -> None:
    """Not on what was asked before: a resumed run, which begins in the middle, sees the same rows."""
    order = StepOrder(n_rows=n_rows, rows_per_step=rows_per_step, seed=seed)
    once = {step: order.rows(step).tolist() for step in asked}
    for step in reversed(asked):
        twin = StepOrder(n_rows=n_rows, rows_per_step=rows_per_step, seed=seed)
        assert twin.rows(step).tolist() == once[step]


def test_another_process_has_the_same_order() -> None:
    code = (
        "from whet.data.order import StepOrder; print(StepOrder(n_rows=40, rows_per_step=40, seed=9).rows(2).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(StepOrder(n_rows=40, rows_per_step=40, seed=9).rows(2).tolist())


def test_seeds_and_epochs_differ() -> None:
    orders = {
        tuple(StepOrder(n_rows=50, rows_per_step=50, seed=seed).rows(epoch).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100
    assert tuple(range(50)) not in orders


def test_every_row_may_come_first() -> None:
    """Over 4000 epochs, each of 8 rows is first 500 times, give or take; five standard deviations are 105."""
    firsts = [StepOrder(n_rows=8, rows_per_step=1, seed=1).rows(8 * epoch)[0] for epoch in range(4000)]
    counts = np.bincount(firsts, minlength=8)
    assert counts.sum() == 4000
    assert np.abs(counts - 500).max() < 105


def test_what_a_caller_does_to_the_rows_does_not_change_the_order() -> None:
    order = StepOrder(n_rows=12, rows_per_step=4, seed=5)
    before = order.rows(1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        order.rows(1)[0] = 0
    assert order.rows(1).tolist() == before
