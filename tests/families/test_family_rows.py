"""The rows of a packed batch know nothing of each other: neither their tokens nor their dropout masks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine
from tiny import FAMILIES, VOCABULARY, arguments, plain_torch, tiny_model, tiny_rows
from whet.data.batch import pack
from whet.data.store import RowStore
from whet.kernels.batch_position import Drop, Placement, Site
from whet.kernels.dropout import dropout
from whet.models.packed import position_of

# Products of another number of tokens may sum in another order; here, none did. A mask that differs in one place moves
# logits, which are of size 0.5, by more than 1e-3.
TOLERANCE = 2e-6
SEED, STEP = 11, 4

operators = pytest.mark.usefixtures("operators")
families = pytest.mark.parametrize("family", FAMILIES)


class Rows:
    """Gives the start logits of rows in a packed batch, in training mode with dropout or without."""

    def __init__(self, folder: Path, family: str, dropout: float) -> None:
        self.trainer = engine.Trainer(model=tiny_model(family, dropout=dropout), args=arguments(folder))
        assert self.trainer.objective.packed
        self.trainer.model.train()

    def __call__(self, rows: RowStore, first_slot: int = 0, **place: int) -> list[np.ndarray]:
        """Return one array (tokens,) a row; the first row has this slot, the next one the next."""
        objective: Any = self.trainer.objective
        batch = objective.batch(rows, range(len(rows)), first_slot)
        with torch.no_grad():
            output = objective.forward(batch, **({"seed": SEED, "step": STEP} | place))
        logits = objective.logits(output, batch)[0]
        return [line[:length] for line, length in zip(logits, rows.lengths, strict=True)]


def assert_all_close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def farthest(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


@operators
@families
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_rows_tokens_do_not_reach_another(tmp_path: Path, family: str, dropout: float) -> None:
    """Every other row stays as it is in every bit: each of its numbers comes from the same sums."""
    rows, changed_row = tiny_rows(6, family), 2
    ids = rows.tokens["input_ids"].copy()
    inside = slice(rows.cu_seqlens[changed_row], rows.cu_seqlens[changed_row + 1])
    ids[inside] = VOCABULARY - 1 - ids[inside]
    changed = RowStore(rows.cu_seqlens, dict(rows.tokens) | {"input_ids": ids}, rows.labels)
    logits_of = Rows(tmp_path, family, dropout)
    before, after = logits_of(rows), logits_of(changed)
    assert farthest(before[changed_row], after[changed_row]) > 0.01
    for row in set(range(6)) - {changed_row}:
        np.testing.assert_array_equal(after[row], before[row])


@operators
@families
def test_a_row_has_the_same_masks_whatever_surrounds_it(tmp_path: Path, family: str) -> None:
    """Row 3 of a step: among six rows, in the middle of another micro-batch, alone."""
    rows = tiny_rows(6, family)
    logits_of = Rows(tmp_path, family, 0.1)
    together = logits_of(rows)
    alone = [logits_of(rows.take([row]), first_slot=row)[0] for row in range(6)]
    halves = logits_of(rows.take([0, 1]), first_slot=0) + logits_of(rows.take([2, 3, 4, 5]), first_slot=2)
    assert_all_close(alone, together)
    assert_all_close(halves, together)


@operators
@families
def test_masks_follow_seed_step_and_slot(tmp_path: Path, family: str) -> None:
    """The same row elsewhere in the run is dropped elsewhere; in the same place, in the same places."""
    row = tiny_rows(1, family, lengths=(30, 30))
    logits_of = Rows(tmp_path, family, 0.1)
    here = logits_of(row, 3)[0]
    np.testing.assert_array_equal(logits_of(row, 3)[0], here)
    elsewhere = [
        logits_of(row, 4)[0],
        logits_of(row, 3, step=STEP + 1)[0],
        logits_of(row, 3, seed=SEED + 1)[0],
        Rows(tmp_path, family, 0.0)(row, 3)[0],
    ]
    assert min(farthest(other, here) for other in elsewhere) > 0.01


@families
def test_native_and_plain_operators_draw_the_same_masks(tmp_path: Path, family: str) -> None:
    rows = tiny_rows(6, family)
    native = Rows(tmp_path, family, 0.1)(rows)
    with plain_torch():
        plain = Rows(tmp_path, family, 0.1)(rows)
    assert_all_close(native, plain)


@operators
def test_a_layer_that_runs_twice_draws_anew_each_time() -> None:
    """As ALBERT's do: with one mask for every use, all its layers would drop the same channels."""
    placement = Placement()
    sites = [Site(placement, number, n_sites=2) for number in (0, 1, 0, 1, 0)]
    batch = pack(tiny_rows(3), first_slot=0, position_offset=0)
    position, x = position_of(batch, seed=SEED, step=STEP), torch.ones(batch.n_computed, 64)
    with placement.at(position):
        uses = [dropout(x, Drop(0.3, position, site.use(position))) for site in sites]
    assert all(not torch.equal(one, two) for one, two in combinations(uses, 2))
    with placement.at(position):
        assert torch.equal(dropout(x, Drop(0.3, position, sites[0].use(position))), uses[0])


@operators
def test_evaluation_drops_nothing(tmp_path: Path) -> None:
    with_dropout, without = (Rows(tmp_path, "bert", p) for p in (0.5, 0.0))
    with_dropout.trainer.model.eval()
    assert_all_close(with_dropout(tiny_rows(6)), without(tiny_rows(6)))
