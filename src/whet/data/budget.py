"""How the rows of a step are split into micro-batches: by rows, and by tokens if these have a limit."""

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
    does="A micro-batch with more tokens than the budget is split between sequences.",
    improves="memory",
    same_result="yes",
    hurts="When all sequences have the same length: a smaller batch does the same.",
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
    if isinstance(dataset, RowStore) or not len(rows) or not _is_nested(dataset[int(rows[0])]):
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
