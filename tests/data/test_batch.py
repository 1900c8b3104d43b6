"""Rows of a data set become a packed batch, or an error that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import filled_length, pack, rows_of
from whet.data.padding import Padding
from whet.data.store import RowStore
from whet.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 1], "start_positions": 1, "end_positions": 2},
    {"input_ids": [8], "token_type_ids": [0], "start_positions": 0, "end_positions": 0},
    {"input_ids": [9, 10], "token_type_ids": [0, 1], "start_positions": 0, "end_positions": 1},
]


def store() -> RowStore:
    """The rows, end to end."""
    return rows_of(ROWS, range(3))


def test_packed_rows_are_end_to_end() -> None:
    batch = pack(store(), first_slot=4, position_offset=0)
    assert batch.cu_seqlens is not None
    assert batch.positions is not None
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 1, 0, 0, 1]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert {name: label.tolist() for name, label in batch.labels.items()} == {
        "start_positions": [1, 0, 0],
        "end_positions": [2, 0, 1],
    }
    assert (batch.n_rows, batch.first_slot, batch.n_tokens, batch.n_computed, batch.n_padded) == (3, 4, 6, 6, 9)
    assert {tensor.dtype for tensor in batch.inputs.values()} == {torch.int64}
    assert batch.cu_seqlens.dtype == batch.positions.dtype == torch.int32


def test_position_offset_of_a_family_is_added() -> None:
    """The model gets them so; masks go on counting from 0."""
    batch = pack(store(), first_slot=0, position_offset=2)
    assert batch.positions is not None
    assert batch.inputs["position_ids"].tolist() == [[2, 3, 4, 2, 2, 3]]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_batch_reports_the_tokens_of_a_padded_run() -> None:
    assert pack(store(), first_slot=0, position_offset=0, padding=Padding(length=384)).n_padded == 3 * 384
    assert pack(store().take([1]), first_slot=0, position_offset=0).n_padded == 1


KINDS: dict[str, Any] = {
    "list": ROWS,
    "data set of the hub's library": Dataset.from_list(ROWS),
    "arrays": [{name: np.asarray(value) for name, value in row.items()} for row in ROWS],
    "tensors": [{name: torch.tensor(value) for name, value in row.items()} for row in ROWS],
    "masked": [row | {"attention_mask": [1] * len(row["input_ids"])} for row in ROWS],
    "padded": [
        {
            "input_ids": row["input_ids"] + [0] * (4 - len(row["input_ids"])),
            "token_type_ids": row["token_type_ids"] + [0] * (4 - len(row["input_ids"])),
            "attention_mask": [1] * len(row["input_ids"]) + [0] * (4 - len(row["input_ids"])),
            "start_positions": row["start_positions"],
            "end_positions": row["end_positions"],
        }
        for row in ROWS
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_set_gives_the_same_batch(kind: str) -> None:
    found = rows_of(KINDS[kind], np.array([2, 0]))
    wanted = store().take([2, 0])
    assert list(found) == list(wanted)


def test_row_store_is_used_directly() -> None:
    assert list(rows_of(store(), [2, 0])) == list(store().take([2, 0]))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": [1, 2]}, "row 1 of the data set has no input_ids"),
    "padded on the left": (
        {"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]},
        "row 1 of the data set is padded on the left or in the middle",
    ),
    "a hole": (
        {"input_ids": [0, 1, 2], "attention_mask": [1, 0, 1]},
        "row 1 of the data set is padded on the left or in the middle",
    ),
    "a short column": (
        {"input_ids": [0, 1, 2], "token_type_ids": [0, 0]},
        "row 1 of the data set has a column that is not a token row",
    ),
    "a matrix": (
        {"input_ids": [0, 1, 2], "boxes": [[0, 0], [1, 1], [2, 2]]},
        "row 1 of the data set has a column that is not a token row",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_row_is_named_in_the_error(name: str) -> None:
    row, what = BAD[name]
    with pytest.raises(DataError) as caught:
        rows_of([ROWS[0], row], [0, 1])
    assert str(caught.value).startswith(what)
    assert "fix: " in str(caught.value)


ODD: dict[str, dict[str, Any]] = {
    "a column less": {"input_ids": [5, 6], "start_positions": 0, "end_positions": 1},
    "a column more": ROWS[1] | {"special_tokens_mask": [1]},
    "text": ROWS[1] | {"example_id": "q1"},
    "another kind": ROWS[1] | {"start_positions": [0]},
}


@pytest.mark.parametrize("name", ODD)
def test_row_with_other_columns_is_refused(name: str) -> None:
    """Rows that do not fit each other must not make a batch with columns of different lengths."""
    with pytest.raises(DataError):
        rows_of([ROWS[0], ODD[name]], [0, 1])


def test_text_columns_are_refused() -> None:
    """A data set that kept its ids of questions, as most do before their columns are removed."""
    with pytest.raises(DataError, match="example_id"):
        rows_of([row | {"example_id": "q"} for row in ROWS], [0, 1, 2])


@given(st.integers(1, 100_000))
def test_packed_batch_is_filled_up_by_at_most_a_32nd(n_tokens: int) -> None:
    filled = filled_length(n_tokens)
    assert n_tokens <= filled <= n_tokens * 33 / 32
    assert filled - n_tokens < 64
    assert filled_length(filled) == filled


def test_filled_lengths_have_few_values() -> None:
    """Steps of 12 rows of SQuAD have between 1,500 and 2,600 tokens: one in 50 sizes comes again and again."""
    assert len({filled_length(n) for n in range(1500, 2600)}) <= 27


def test_fill_of_a_batch_is_not_a_row() -> None:
    rows = [{"input_ids": [*range(100 * n, 100 * n + 50)], "start_positions": 0} for n in range(3)]
    batch = pack(rows_of(rows, range(3)), first_slot=2, position_offset=2)
    assert batch.cu_seqlens is not None
    assert batch.positions is not None
    assert (batch.n_tokens, batch.n_computed, batch.cu_seqlens[-1]) == (150, 152, 150)
    assert batch.inputs["input_ids"][0, 150:].tolist() == [0, 1]
    assert batch.inputs["position_ids"][0, 149:].tolist() == [51, 2, 2]
    assert batch.positions[149:].tolist() == [49, 0, 0]
