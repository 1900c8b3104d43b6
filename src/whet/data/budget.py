"""How the rows of a step are split into micro-batches: by rows, and by tokens if these have a limit.

Of several ranks, each gets rows of a micro-batch that follow each other, with about as many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.card import Card
from whet.data.batch import rows_of
from whet.data.columns import Columns
from whet.data.padding import Padding
from whet.data.store import RowStore

CARD = Card(
    name="token budget",
    asked_by="max_tokens_per_batch",
    does="A micro-batch above the budget is split between sequences.",
    improves="memory",
    same_result="yes",
    hurts="When all sequences have one length: use a smaller batch.",
    source="fairseq's max_tokens (Ott et al. 2019, arXiv:1904.01038)",
    page="memory.md#token-budget",
)


def cuts(dataset: Any, rows: np.ndarray, most_rows: int, most_tokens: int | None) -> list[tuple[int, int]]:
    """Return the micro-batches of a step as index ranges (first, last + 1) of `rows`, in order and without gaps.

    Each has at most `most_rows` rows, and at most `most_tokens` tokens unless it is a single row.
    """
    if most_tokens is None:
        return [(first, min(first + most_rows, len(rows))) for first in range(0, len(rows), most_rows)]
    found, first, n_tokens = [], 0, 0
    for place, length in enumerate(tokens_of(dataset, rows).tolist()):
        if place > first and (place - first == most_rows or n_tokens + length > most_tokens):
            found.append((first, place))
            first, n_tokens = place, 0
        n_tokens += length
    return [*found, (first, len(rows))]


def padded_to(
    dataset: Any, rows: np.ndarray, cuts: list[tuple[int, int]], rows_per_batch: int, padding: Padding
) -> list[np.ndarray | None]:
    """Return the padded length of each micro-batch's rows in a padded run with batches of `rows_per_batch` rows.

    None if the loss counts no padding, or if each micro-batch is such a batch.
    """
    ends = [end for _, end in cuts[:-1]]
    if padding.in_loss == "none" or ends == [*range(rows_per_batch, len(rows), rows_per_batch)]:
        return [None] * len(cuts)
    lengths = padding.lengths(_alone(dataset, rows).lengths_with_padding, rows_per_batch)
    return [lengths[first:end] for first, end in cuts]


def tokens_of(dataset: Any, rows: np.ndarray) -> np.ndarray:
    """Return how many real tokens each row has."""
    if isinstance(dataset, RowStore):
        return dataset.cu_seqlens[rows + 1] - dataset.cu_seqlens[rows]
    if not len(rows) or not _is_nested(dataset[int(rows[0])]):
        return _alone(dataset, rows).lengths
    return np.asarray([sum(map(_n_tokens, *_choices(dataset[int(row)]))) for row in rows])


def _is_nested(row: Any) -> bool:
    """Return whether the row holds several sequences, as rows of multiple choice do."""
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    return ids is not None and len(ids) > 0 and np.ndim(ids[0]) == 1


def _choices(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row["input_ids"], row.get("attention_mask", row["input_ids"])


def _n_tokens(ids: Any, mask: Any) -> int:
    return len(ids) if mask is ids else int(np.count_nonzero(mask))


def _alone(dataset: Any, rows: np.ndarray) -> RowStore:
    """Return the rows without their labels."""
    return rows_of(dataset, rows, Columns(["input_ids", "attention_mask"]))


# ---- shares of ranks ----


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
