"""Deals the rows of a micro-batch to the ranks: each gets rows that follow each other, with about as many tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.data.budget import tokens_of
from whet.data.store import RowStore


def shares(weights: np.ndarray, n_ranks: int) -> list[tuple[int, int]]:
    """Return each rank's rows as a range (first, last + 1) of `weights` (rows,), in order and without gaps.

    The heaviest share is as light as ranges of rows allow. With fewer rows than ranks, the last ranks get none.
    """
    if len(weights) <= n_ranks:
        return [(min(n, len(weights)), min(n + 1, len(weights))) for n in range(n_ranks)]
    low, high = max(int(weights.max()), -(-int(weights.sum()) // n_ranks)), int(weights.sum())
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_ends(weights, limit)) <= n_ranks else (limit + 1, high)
    ends = _ends(weights, low)
    while len(ends) < n_ranks:  # the limit is reached with fewer ranks: split the first share that has two rows
        starts = [0, *ends[:-1]]
        place = next(n for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if end - start > 1)
        ends.insert(place, starts[place] + 1)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def weights_of(dataset: Any, rows: np.ndarray, *, packed: bool) -> np.ndarray:
    """Return how much each row weighs in `shares`: its tokens in a packed batch, 1 in a padded one.

    Rows of data sets that make them when they are read weigh 1 too: reading them twice might give other rows.
    """
    by_function = (getattr(dataset, "format", None) or {}).get("type") == "custom"  # of datasets, with_transform
    stored = isinstance(dataset, RowStore | list) or type(dataset).__module__.split(".")[0] == "datasets"
    if not packed or not stored or by_function or not len(rows):
        return np.ones(len(rows), dtype=np.int64)
    return np.maximum(tokens_of(dataset, rows), 1)


def _ends(weights: np.ndarray, limit: int) -> list[int]:
    """Return where each share ends if it takes as many rows as fit into the limit."""
    found, sums, first = [], np.cumsum(weights), 0
    while first < len(weights):
        done = sums[first - 1] if first else 0
        first = int(np.searchsorted(sums, done + limit, side="right"))
        found.append(first)
    return found
