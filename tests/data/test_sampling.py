"""The order of rows within an epoch is that of transformers' own samplers, run as its Trainer runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import trainer_pt_utils
from transformers.trainer_pt_utils import LengthGroupedSampler

from whet.data import order as sampling
from whet.data.order import lengths_of
from whet.errors import DataError

accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer shuffles by accelerate's sampler")


def _lengths(n_rows: int) -> np.ndarray:
    """Lengths with many ties, and the longest one twice."""
    lengths = np.random.default_rng(3).integers(4, 30, n_rows)
    lengths[[n_rows // 3, n_rows - 1]] = 40
    return lengths


@pytest.mark.parametrize("n_rows", [1, 7, 100, 40_000])
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
def test_shuffled_order_equals_accelerates_seedable_sampler(n_rows: int, seed: int) -> None:
    """40,000 rows: torch's permutation takes another way from 30,000 rows on."""
    sampler = accelerate.data_loader.SeedableRandomSampler(range(n_rows), data_seed=seed)
    epochs = sampling.shuffled(n_rows, seed)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert epochs(epoch).tolist() == list(sampler)


@pytest.mark.parametrize(("n_rows", "rows_per_step"), [(1, 8), (30, 8), (31, 1), (1000, 4), (1001, 16)])
def test_grouped_by_length_equals_transformers_sampler_in_a_data_loader(n_rows: int, rows_per_step: int) -> None:
    """The loader's own draw of each epoch belongs to it: it takes from the same generator."""
    lengths = _lengths(n_rows)
    ours = sampling.grouped_by_length(lengths, rows_per_step, 42)
    torch.manual_seed(42)
    sampler = LengthGroupedSampler(rows_per_step, lengths=lengths.tolist())
    loader: DataLoader[int] = DataLoader(range(n_rows), sampler=sampler, batch_size=1, collate_fn=lambda rows: rows[0])  # pyright: ignore[reportArgumentType]
    for epoch in range(3):
        assert ours(epoch).tolist() == list(loader)
    assert int(lengths[ours(0)[0]]) == lengths.max()


def _steps(batches: Sequence[list[int]], per_step: int) -> list[Counter[int]]:
    waiting = iter(batches)
    return [
        Counter(row for batch in step for row in batch) for step in iter(lambda: list(islice(waiting, per_step)), [])
    ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n_rows", "rows", "batches"), [(40, 8, 1), (43, 2, 4), (5, 1, 4), (3, 4, 8), (100, 4, 3)])
def test_rebalanced_steps_have_the_rows_of_transformers(n_rows: int, rows: int, batches: int, drop_last: bool) -> None:
    """Rows that fill up the last step included."""
    if not hasattr(trainer_pt_utils, "BatchRebalanceSampler"):
        pytest.skip("transformers has it since 5.17")
    lengths = _lengths(n_rows)
    theirs = trainer_pt_utils.BatchRebalanceSampler(
        lengths.tolist(), effective_batch_size=rows * batches, dp_size=1, grad_accum=batches, drop_last=drop_last
    )
    ours = sampling.rebalanced(lengths, rows * batches, batches, sampling.REBALANCE_SEED)
    for epoch in range(2):
        theirs.set_epoch(epoch)
        wanted = _steps(list(theirs), batches)
        found = _steps([[row] for row in ours(epoch).tolist()], rows * batches)
        assert found[: len(wanted)] == wanted
        assert len(found) - len(wanted) == (n_rows % (rows * batches) > 0 and drop_last)


def test_rebalanced_batches_have_about_as_many_tokens() -> None:
    lengths = np.random.default_rng(0).integers(10, 380, 96)
    order = sampling.rebalanced(lengths, 32, 4, 1)(0)
    shuffled = sampling.shuffled(96, 1)(0)

    def spread(rows: np.ndarray) -> float:
        tokens = lengths[rows].reshape(-1, 4, 8).sum(2)
        return float((tokens.max(1) / tokens.mean(1)).max())

    assert spread(order) < 1.1 < 1.2 < spread(shuffled)


def test_lengths_come_from_the_column_or_the_tokens() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": list(range(n)), "size": 2 * n} for n in (3, 5, 1)]
    table = datasets.Dataset.from_list(rows)
    assert lengths_of(rows, "length").tolist() == lengths_of(table, "length").tolist() == [3, 5, 1]
    assert lengths_of(table, "size").tolist() == [6, 10, 2]
    with pytest.raises(DataError, match="no length"):
        lengths_of([{"x": 1}], "length")
    with pytest.raises(DataError, match="does not contain lengths"):
        lengths_of(table, "input_ids")


def test_permutation_equals_a_random_sampler_seeded_with_seed_plus_epoch() -> None:
    """What the documents of torch and accelerate promise, without accelerate."""
    for epoch in range(2):
        sampler = RandomSampler(range(50), generator=torch.Generator().manual_seed(7 + epoch))
        assert sampling.shuffled(50, 7)(epoch).tolist() == list(sampler)
