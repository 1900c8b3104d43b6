"""A micro-batch: rows end to end without padding, or padded for a model that knows no other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.columns import Columns
from whet.data.store import RowStore
from whet.errors import DataError

_SHARE, _LARGEST_STEP = 32, 64


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads.

    `inputs` are the model's keyword arguments, `labels` what its loss needs beside them. For packed batches
    `row_starts` is (rows + 1,) and `positions` (n_computed,), int32; for padded ones both are None. What a packed batch
    computes behind its last row fills it up to a size that comes again (`filled_length`); no loss reads it.
    """

    inputs: Mapping[str, Any]
    labels: Mapping[str, Tensor]
    n_rows: int
    first_slot: int
    """Place of the first row in the step's global batch."""
    n_tokens: int
    """Real tokens."""
    n_computed: int
    """Token places that the model computes, padding included."""
    n_padded: int
    """Token places that it would compute with every row padded."""
    row_starts: Tensor | None = None
    positions: Tensor | None = None
    longest: int = 0
    """Tokens of the longest row of a packed batch."""

    def to(self, device: torch.device) -> Batch:
        """Return the batch on the device."""
        return self if device.type == "cpu" else self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in memory that a GPU copies from by itself, while it and the program go on."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return replace(
            self,
            inputs={name: changed(value) for name, value in self.inputs.items()},
            labels={name: changed(value) for name, value in self.labels.items()},
            row_starts=changed(self.row_starts),
            positions=changed(self.positions),
        )


def filled_length(n_tokens: int) -> int:
    """Return how many token places a packed batch of n_tokens has: at most a 32nd more, and no more than 63.

    The libraries that multiply matrices build code for every number of rows that they meet, which takes a millisecond
    and half a megabyte each time, and keep it. So few numbers should occur, as batches of other tokens follow.
    """
    step = min(_LARGEST_STEP, 1 << max(0, (n_tokens // _SHARE).bit_length() - 1))
    return -(-n_tokens // step) * step


def pack(rows: RowStore, *, first_slot: int, position_offset: int, padded_length: int | None = None) -> Batch:
    """Return the rows end to end, as a batch of one long row (1, N) with positions that start anew in each row.

    `position_offset` is the model family's first position id (RoBERTa counts from padding_idx + 1); `padded_length` is
    what rows would be padded to, the longest of the batch where it is None (for the log's account of padding avoided).
    """
    lengths, n_tokens = rows.lengths, int(rows.row_starts[-1])
    n_more = filled_length(n_tokens) - n_tokens
    in_rows = np.arange(n_tokens) - np.repeat(rows.row_starts[:-1], lengths)
    positions = np.concatenate([in_rows, np.zeros(n_more)]).astype(np.int32)
    # The batch's first tokens once more, all at a row's first position: what surely is a token of this model.
    columns = {name: np.concatenate([column, column[:n_more]]) for name, column in rows.tokens.items()}
    inputs = {name: torch.from_numpy(column.astype(np.int64)).unsqueeze(0) for name, column in columns.items()}
    inputs["position_ids"] = torch.from_numpy(positions.astype(np.int64) + position_offset).unsqueeze(0)
    return Batch(
        inputs=inputs,
        labels={name: torch.from_numpy(column.astype(np.int64)) for name, column in rows.labels.items()},
        n_rows=len(rows),
        first_slot=first_slot,
        n_tokens=n_tokens,
        n_computed=len(positions),
        n_padded=len(rows) * (padded_length or int(lengths.max())),
        row_starts=torch.from_numpy(rows.row_starts.astype(np.int32)),
        positions=torch.from_numpy(positions),
        longest=int(lengths.max()),
    )


def rows_of(dataset: Any, indices: Sequence[int] | np.ndarray, columns: Columns | None = None) -> RowStore:
    """Return these rows of a map-style data set as a store: columns as long as `input_ids`, and one number a row.

    Rows that carry an `attention_mask` lose what it masks, and all rows what is none of `columns`. Raises DataError for
    a row that is not of that form, or whose columns are not those of the first.
    """
    if isinstance(dataset, RowStore):
        return dataset.take(indices)
    given = ((int(index), dataset[int(index)]) for index in indices)
    rows = [_without_padding(row if columns is None else columns.of(row), index) for index, row in given]
    _require_alike(rows, indices)
    token_names = [name for name, value in rows[0].items() if value.ndim == 1]
    label_names = [name for name, value in rows[0].items() if value.ndim == 0]
    starts = np.concatenate([[0], np.cumsum([len(row["input_ids"]) for row in rows])]).astype(np.int64)
    return RowStore(
        row_starts=starts,
        tokens={name: np.concatenate([row[name] for row in rows]) for name in token_names},
        labels={name: np.asarray([int(row[name]) for row in rows]) for name in label_names},
    )


def _without_padding(row: Mapping[str, Any], index: int) -> dict[str, np.ndarray]:
    if "input_ids" not in row:
        raise DataError(
            what=f"row {index} of the data set has no input_ids",
            got=sorted(row),
            why="a packed batch is made of token rows",
            fix="give rows with input_ids, or a data_collator of your own",
        )
    n_tokens = len(row["input_ids"])
    mask = np.asarray(row.get("attention_mask", np.ones(n_tokens)), dtype=bool)
    if not mask[: mask.sum()].all():
        raise DataError(
            what=f"row {index} of the data set is padded on the left or in the middle",
            why="its labels point at places in the padded row, which packing would move",
            fix="pad on the right, or not at all: whet needs no padding",
        )
    columns = {name: np.asarray(value) for name, value in row.items() if name != "attention_mask"}
    odd = [name for name, value in columns.items() if not _is_whole(value) or value.shape not in ((), (n_tokens,))]
    if odd:
        raise DataError(
            what=f"row {index} of the data set has a column that is no token row",
            got={name: f"{columns[name].dtype} {columns[name].shape}" for name in odd},
            why=f"each column holds one whole number a token ({n_tokens} here) or one number a row",
            fix="drop the column, or give a data_collator of your own",
        )
    return {name: value[mask] if value.ndim else value for name, value in columns.items()}


def _is_whole(column: np.ndarray) -> bool:
    """Return whether the column holds whole numbers, or nothing."""
    return column.dtype.kind in "biu" or column.size == 0


def _require_alike(rows: Sequence[Mapping[str, np.ndarray]], indices: Sequence[int] | np.ndarray) -> None:
    kinds = [{name: value.ndim for name, value in row.items()} for row in rows]
    for index, kind in zip(indices, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                what=f"row {index} of the data set has other columns than row {indices[0]}",
                got=sorted(name for name in kind.keys() | kinds[0].keys() if kind.get(name) != kinds[0].get(name)),
                why="rows of one batch are laid end to end, column by column",
                fix="give every row the same columns, each with one number a token or one a row",
            )
