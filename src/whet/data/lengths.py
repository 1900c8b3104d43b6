"""The number of tokens of each row of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.data.store import RowStore
from whet.errors import DataError


def lengths_of(dataset: Any, column: str) -> np.ndarray:
    """Return the length of each row, (rows,) int64: the values of `column` if it exists, else the number of tokens.

    Without the column, every row is read.
    """
    if isinstance(dataset, RowStore):
        return dataset.lengths
    if column in (getattr(dataset, "column_names", None) or ()):
        return _integers(dataset[column], column)
    return np.asarray([_n_tokens(dataset[row], row) for row in range(len(dataset))], dtype=np.int64)


def _n_tokens(row: Any, index: int) -> int:
    if isinstance(row, Mapping) and "input_ids" in row:
        return len(row["input_ids"])
    raise DataError(
        what=f"row {index} of the training set has no length",
        got=sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__,
        why="group_by_length and batch_rebalance sort the rows by their number of tokens",
        fix="give rows with input_ids, or a data set with a column of lengths and name it in --length_column_name; "
        "--train_sampling_strategy random needs no lengths",
    )


def _integers(values: Any, column: str) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths, not numbers
        found = np.empty(0, dtype=object)
    if found.ndim == 1 and found.dtype.kind in "iu":
        return found.astype(np.int64)
    raise DataError(
        what=f"the column {column} does not contain lengths",
        got=f"its first entry is {str(values[0])[:80]}",
        why="--length_column_name names the column with each row's number of tokens, an integer",
        fix="name another column in --length_column_name; without one, the lengths of input_ids are counted",
    )
