"""A micro-batch: rows end to end without padding, or padded for models that need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.columns import Columns
from whet.data.padding import NO_PADDING, Padding, PaddingTokens, Samples
from whet.data.store import RowStore
from whet.errors import DataError
from whet.on_host import moved

_SHARE, _LARGEST_STEP = 32, 64


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass.

    `inputs` are the model's keyword arguments, `labels` the additional inputs of its loss. For packed batches
    `cu_seqlens` is (rows + 1,) and `positions` (n_computed,), int32; for padded ones both are None. Rows may end with
    padding tokens, which `padding` describes; None: there are none. A packed batch is filled up after its last row to a
    size that recurs (`filled_length`); no loss reads these tokens.
    """

    inputs: Mapping[str, Any]
    labels: Mapping[str, Tensor]
    n_rows: int
    first_slot: int
    """Index of the first row in the step's global batch."""
    n_tokens: int
    """Real tokens."""
    n_computed: int
    """Tokens that the model computes, padding included."""
    n_padded: int
    """Tokens that it would compute with every row padded."""
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    max_seqlen: int = 0
    """Tokens of the longest row of a packed batch, its padding tokens included."""
    padding: PaddingTokens | None = None
    columns: Tensor | None = None
    """Where in the flattened padded `inputs` each token (n_computed,) comes from, where these are packed later."""

    rows: np.ndarray | None = None
    """The indices (rows,) of its rows in the training data; None: it is no batch of a run whose rows have one."""
    is_extra: bool = False
    """Whether its rows count nothing: a rank without rows of its own computes them, as all make the same exchanges."""

    @property
    def n_in_rows(self) -> int:
        """Tokens of the rows of a packed batch: real ones, and computed padding tokens."""
        return self.n_tokens + (0 if self.padding is None else self.padding.n)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on the device."""
        return self if device.type == "cpu" else self._each(lambda tensor: moved(tensor, device))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU copies asynchronously."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return replace(
            self,
            inputs={name: changed(value) for name, value in self.inputs.items()},
            labels={name: changed(value) for name, value in self.labels.items()},
            cu_seqlens=changed(self.cu_seqlens),
            positions=changed(self.positions),
            padding=None if self.padding is None else self.padding.each(change),
            columns=changed(self.columns),
        )


def filled_length(n_tokens: int) -> int:
    """Return the filled length of a packed batch of n_tokens: at most a 32nd more, and at most 63 more.

    Matrix libraries build and keep code for every number of rows, which takes a millisecond and half a megabyte each
    time. The lengths of batches should therefore have few distinct values.
    """
    step = min(_LARGEST_STEP, 1 << max(0, (n_tokens // _SHARE).bit_length() - 1))
    return -(-n_tokens // step) * step


HOLES = "rows with padding between tokens"
"""Why a batch keeps its padding: end to end, tokens would be nearer to each other than the model has them."""


def has_holes(real: Tensor) -> bool:
    """Return whether a row of this mask (rows, places) has padding between two tokens."""
    begins = real[:, 1:] & ~real[:, :-1]
    return bool((begins.sum(1) + real[:, 0] > 1).any())


def pack(
    rows: RowStore,
    *,
    first_slot: int,
    position_offset: int,
    unnumbered: int | None = None,
    padding: Padding = NO_PADDING,
    padded_to: np.ndarray | None = None,
) -> Batch:
    """Return the rows end to end, as a batch of one long row (1, N) with positions that restart in each row.

    `position_offset` is the model family's first position id (RoBERTa counts from padding_idx + 1). `unnumbered` is a
    token whose position id is its own number, and which later tokens of its row do not count. `padded_to` (rows,) is
    the length to which `padding` would pad each row; None: these rows are a batch.
    """
    if padded_to is None:
        padded_to = padding.lengths(rows.lengths_with_padding, len(rows))
    samples = padding.sample(rows.lengths, padded_to)
    cu_seqlens = rows.cu_seqlens + np.append(0, samples.counts.cumsum())
    positions = _positions(rows, samples)
    n_more = len(positions) - cu_seqlens[-1]
    columns = {name: _column(rows, samples, column, padding.fill(name)) for name, column in rows.tokens.items()}
    # The fill repeats the batch's first tokens, all at a row's first position: these are valid for every model.
    columns = {name: np.append(column, column[:n_more]) for name, column in columns.items()}
    columns["position_ids"] = positions + position_offset
    if unnumbered is not None:
        _skip(unnumbered, columns["position_ids"], columns["input_ids"], cu_seqlens)
    return Batch(
        inputs={name: torch.from_numpy(column).unsqueeze(0) for name, column in columns.items()},
        labels={name: torch.from_numpy(column.astype(np.int64)) for name, column in rows.labels.items()},
        n_rows=len(rows),
        first_slot=first_slot,
        n_tokens=int(rows.cu_seqlens[-1]),
        n_computed=len(positions),
        n_padded=int(padded_to.sum()),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        max_seqlen=int(np.diff(cu_seqlens).max()),
        padding=None if padding.in_loss == "none" else PaddingTokens.of(samples, rows.cu_seqlens),
    )


def _positions(rows: RowStore, samples: Samples) -> np.ndarray:
    """Return the column of each token in the padded batch; 0 for tokens that fill up the packed batch."""
    in_rows = np.arange(rows.cu_seqlens[-1]) - np.repeat(rows.cu_seqlens[:-1], rows.lengths)
    positions = _column(rows, samples, in_rows, samples.columns)
    return np.pad(positions, (0, filled_length(len(positions)) - len(positions)))


def _skip(unnumbered: int, position_ids: np.ndarray, input_ids: np.ndarray, cu_seqlens: np.ndarray) -> None:
    """Change the position ids of rows with this token: it does not count, and its position id is its number."""
    skipped = input_ids[: cu_seqlens[-1]] == unnumbered
    so_far = np.append(0, skipped.cumsum())
    in_rows = so_far[1:] - np.repeat(so_far[cu_seqlens[:-1]], np.diff(cu_seqlens))
    position_ids[: cu_seqlens[-1]] -= in_rows
    position_ids[: cu_seqlens[-1]][skipped] = unnumbered


def _column(rows: RowStore, samples: Samples, of_tokens: np.ndarray, of_padding: np.ndarray | int) -> np.ndarray:
    """Return a column of all computed tokens, from the columns of real and padding tokens."""
    real, padding = samples.places(rows.cu_seqlens)
    column = np.empty(len(real) + len(padding), dtype=np.int64)
    column[real], column[padding] = of_tokens, of_padding
    return column


def rows_of(dataset: Any, indices: Sequence[int] | np.ndarray, columns: Columns | None = None) -> RowStore:
    """Return these rows of a map-style data set as a store: columns as long as `input_ids`, and one number per row.

    Tokens masked by an `attention_mask` and all names outside of `columns` are removed. Raises DataError for a row of
    another form, or with other columns than the first.
    """
    if isinstance(dataset, RowStore):
        return dataset.take(indices)
    given = [dataset[int(index)] for index in indices]
    kept = [row if columns is None else columns.of(row) for row in given]
    rows = [_without_padding(row, int(index)) for row, index in zip(kept, indices, strict=True)]
    _require_alike(rows, indices)
    token_names = [name for name, value in rows[0].items() if value.ndim == 1]
    label_names = [name for name, value in rows[0].items() if value.ndim == 0]
    starts = np.concatenate([[0], np.cumsum([len(row["input_ids"]) for row in rows])]).astype(np.int64)
    return RowStore(
        cu_seqlens=starts,
        tokens={name: np.concatenate([row[name] for row in rows]) for name in token_names},
        labels={name: np.asarray([int(row[name]) for row in rows]) for name in label_names},
        given_lengths=np.asarray([len(row["input_ids"]) for row in given], dtype=np.int64),
    )


def _without_padding(row: Mapping[str, Any], index: int) -> dict[str, np.ndarray]:
    if "input_ids" not in row:
        raise DataError(
            what=f"row {index} of the data set has no input_ids",
            got=sorted(row),
            why="a packed batch consists of token rows",
            fix="tokenise the data set first, so that its rows have input_ids, start_positions and end_positions; "
            "whet qa does so with a file of questions",
        )
    n_tokens = len(row["input_ids"])
    mask = np.asarray(row.get("attention_mask", np.ones(n_tokens)), dtype=bool)
    if not mask[: mask.sum()].all():
        raise DataError(
            what=f"row {index} of the data set is padded on the left or in the middle",
            why="its labels are positions in the padded row, which packing would move",
            fix="pad on the right, or do not pad: whet needs no padding",
        )
    columns = {name: np.asarray(value) for name, value in row.items() if name != "attention_mask"}
    odd = [name for name, value in columns.items() if not _is_integer(value) or value.shape not in ((), (n_tokens,))]
    if odd:
        raise DataError(
            what=f"row {index} of the data set has a column that is not a token row",
            got={name: f"{columns[name].dtype} {columns[name].shape}" for name in odd},
            why=f"each column has one integer per token ({n_tokens} here) or one number per row",
            fix="drop the column, or pass your own data_collator",
        )
    return {name: value[mask] if value.ndim else value for name, value in columns.items()}


def _is_integer(column: np.ndarray) -> bool:
    """Return whether the column holds integers, or nothing."""
    return column.dtype.kind in "biu" or column.size == 0


def _require_alike(rows: Sequence[Mapping[str, np.ndarray]], indices: Sequence[int] | np.ndarray) -> None:
    kinds = [{name: value.ndim for name, value in row.items()} for row in rows]
    for index, kind in zip(indices, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                what=f"row {index} of the data set has other columns than row {indices[0]}",
                got=sorted(name for name in kind.keys() | kinds[0].keys() if kind.get(name) != kinds[0].get(name)),
                why="rows of a batch are concatenated column by column",
                fix="give every row the same columns, each with one number per token or one per row",
            )
