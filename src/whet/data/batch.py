"""A micro-batch: rows end to end without padding, or padded for a model that knows no other way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.store import RowStore
from whet.errors import DataError


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads.

    `inputs` are the model's keyword arguments, `labels` what its loss needs beside them. For packed batches
    `row_starts` is (rows + 1,) and `positions` (N,), int32; for padded ones both are None.
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

    def to(self, device: torch.device) -> Batch:
        """Return the batch on the device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            inputs={name: _moved(value, device) for name, value in self.inputs.items()},
            labels={name: _moved(value, device) for name, value in self.labels.items()},
            row_starts=_moved(self.row_starts, device),
            positions=_moved(self.positions, device),
        )


def pack(rows: RowStore, *, first_slot: int, position_offset: int, padded_length: int | None = None) -> Batch:
    """Return the rows end to end, as a batch of one long row (1, N) with positions that start anew in each row.

    `position_offset` is the model family's first position id (RoBERTa counts from padding_idx + 1); `padded_length` is
    what rows would be padded to, the longest of the batch where it is None (for the log's account of padding avoided).
    """
    lengths = rows.lengths
    positions = np.arange(rows.row_starts[-1], dtype=np.int32) - np.repeat(rows.row_starts[:-1], lengths).astype(
        np.int32
    )
    inputs = {name: torch.from_numpy(column.astype(np.int64)).unsqueeze(0) for name, column in rows.tokens.items()}
    inputs["position_ids"] = torch.from_numpy(positions.astype(np.int64) + position_offset).unsqueeze(0)
    return Batch(
        inputs=inputs,
        labels={name: torch.from_numpy(column.astype(np.int64)) for name, column in rows.labels.items()},
        n_rows=len(rows),
        first_slot=first_slot,
        n_tokens=len(positions),
        n_computed=len(positions),
        n_padded=len(rows) * (padded_length or int(lengths.max())),
        row_starts=torch.from_numpy(rows.row_starts.astype(np.int32)),
        positions=torch.from_numpy(positions),
    )


def rows_of(dataset: Any, indices: Sequence[int] | np.ndarray) -> RowStore:
    """Return these rows of a map-style data set as a store: columns as long as `input_ids`, and one number a row.

    Rows that carry an `attention_mask` lose what it masks. Raises DataError for a row that is not of that form.
    """
    if isinstance(dataset, RowStore):
        return dataset.take(indices)
    rows = [_without_padding(dataset[int(index)], int(index)) for index in indices]
    names = [name for name in rows[0] if name != "attention_mask"]
    token_names = [name for name in names if np.ndim(rows[0][name]) == 1]
    label_names = [name for name in names if np.ndim(rows[0][name]) == 0]
    starts = np.concatenate([[0], np.cumsum([len(row["input_ids"]) for row in rows])]).astype(np.int64)
    return RowStore(
        row_starts=starts,
        tokens={name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in token_names},
        labels={name: np.asarray([int(row[name]) for row in rows]) for name in label_names},
    )


def _without_padding(row: Mapping[str, Any], index: int) -> dict[str, Any]:
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
    odd = [name for name, value in columns.items() if value.ndim > 1 or (value.ndim == 1 and len(value) != n_tokens)]
    if odd:
        raise DataError(
            what=f"row {index} of the data set has a column that is no token row",
            got={name: columns[name].shape for name in odd},
            why=f"each column holds one number a token ({n_tokens} here) or one number a row",
            fix="drop the column, or give a data_collator of your own",
        )
    return {name: value[mask] if value.ndim else value for name, value in columns.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
