"""max_tokens_per_batch: smaller forward passes, the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
import whet
from tiny import arguments, losses, tiny_model, tiny_rows
from whet.data import budget

LOSS_TOLERANCE = 1e-6  # as for accumulation: sums of float32 in another order


def test_cuts_are_whole_rows_within_both_limits() -> None:
    rows = tiny_rows(200, lengths=(6, 40))
    order = np.random.default_rng(0).permutation(200)
    lengths = rows.lengths[order]
    for most_rows, most_tokens in ((12, 100), (3, 100), (200, 41), (12, 10**6)):
        cuts = budget.cuts(rows, order, most_rows, most_tokens)
        assert [0, *(last for _, last in cuts)] == [*(first for first, _ in cuts), 200]
        sizes = [int(lengths[a:b].sum()) for a, b in cuts]
        assert all(size <= most_tokens and b - a <= most_rows for size, (a, b) in zip(sizes, cuts, strict=True))
        # None could have taken the row behind it as well.
        for (a, b), size in zip(cuts[:-1], sizes, strict=False):
            assert b - a == most_rows or size + lengths[b] > most_tokens


def test_a_row_over_the_limit_runs_alone() -> None:
    rows = tiny_rows(5, lengths=(30, 30))
    assert budget.cuts(rows, np.arange(5), 4, 10) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_rows_of_any_data_set_are_counted_without_their_padding() -> None:
    rows = [{"input_ids": [1] * 8, "attention_mask": [1] * n + [0] * (8 - n)} for n in (2, 8, 3, 3)]
    assert budget.cuts(rows, np.arange(4), 4, 10) == [(0, 2), (2, 4)]


def test_the_curve_stays_and_batches_get_smaller(tmp_path: Path) -> None:
    def run(**changes: Any) -> tuple[list[float], list[int]]:
        args = arguments(tmp_path, per_device_train_batch_size=12, max_steps=8, **changes)
        trainer = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(60))
        sizes: list[int] = []
        forward = trainer.objective.forward
        trainer.objective.forward = lambda batch, **place: sizes.append(batch.n_tokens) or forward(batch, **place)
        trainer.train()
        return losses(trainer), sizes

    whole, large = run()
    cut, small = run(max_tokens_per_batch=90)
    assert cut == pytest.approx(whole, rel=LOSS_TOLERANCE)
    assert max(small) <= 90 < max(large)
    assert sum(small) == sum(large)


def test_padded_models_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_tokens_per_batch=100)
    with pytest.raises(whet.ConfigError, match="max_tokens_per_batch goes with packed batches"):
        engine.Trainer(model=tiny_model("bert", is_decoder=True), args=args)
