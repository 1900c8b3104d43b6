"""The flat store of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.store import RowStore

quick = settings(max_examples=40, deadline=None, derandomize=True)


def store_of(rows: list[list[int]]) -> RowStore:
    """Return a store whose segments are the ids, halved, and whose labels count the rows."""
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    numbers = np.arange(len(rows), dtype=np.int64)
    return RowStore(starts, {"input_ids": ids, "token_type_ids": ids // 2}, {"start_positions": numbers * 10})


ROWS = [[5, 6, 7], [], [8], [9, 10]]


def test_rows_of_a_store_are_features() -> None:
    """Plain lists and ints, as the data sets of transformers hold them."""
    store = store_of(ROWS)
    assert len(store) == 4
    assert store[0] == {"input_ids": [5, 6, 7], "token_type_ids": [2, 3, 3], "start_positions": 0}
    assert store[1] == {"input_ids": [], "token_type_ids": [], "start_positions": 10}
    assert store[-1] == store[3]
    assert [row["input_ids"] for row in store] == ROWS
    first = store[0]
    assert {type(value) for value in first.values()} == {list, int}
    assert type(first["input_ids"][0]) is int  # pyright: ignore[reportIndexIssue]
    assert store.lengths.tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("row", [4, -5, 100])
def test_missing_row_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        store_of(ROWS)[row]


@quick
@given(
    rows=st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=1, max_size=8),
    wanted=st.lists(st.integers(0, 7), max_size=10),
)
def test_take_returns_the_rows_in_the_given_order(rows: list[list[int]], wanted: list[int]) -> None:
    """Rows may be taken twice, and none may be taken."""
    store, index = store_of(rows), [row % len(rows) for row in wanted]
    taken = store.take(index)
    assert len(taken) == len(index)
    assert list(taken) == [store[row] for row in index]


def test_take_does_not_change_the_store() -> None:
    store = store_of(ROWS)
    taken = store.take([3, 0])
    taken.tokens["input_ids"][:] = 0
    taken.labels["start_positions"][:] = 0
    assert [row["input_ids"] for row in store] == ROWS
    assert store[3]["start_positions"] == 30


def test_take_refuses_a_missing_row() -> None:
    with pytest.raises(IndexError):
        store_of(ROWS).take([0, 4])


def test_saved_store_is_restored(tmp_path: Path) -> None:
    """Values, order and dtypes; also of a store whose arrays lie in memory in steps."""
    store = store_of(ROWS)
    strided = RowStore(store.cu_seqlens, {"input_ids": np.arange(12, dtype=np.int32)[::2]}, {})
    for name, one in (("whole", store), ("strided", strided), ("empty", store_of([]))):
        one.save(tmp_path / name)
        found = RowStore.load(tmp_path / name)
        wanted = one.arrays()
        assert found.arrays().keys() == wanted.keys()
        for column, array in found.arrays().items():
            np.testing.assert_array_equal(array, wanted[column])
            assert array.dtype == wanted[column].dtype
        assert len(found) == len(one)


def test_from_arrays_ignores_other_arrays() -> None:
    """What is kept in the same file under other names does not become a column."""
    arrays = store_of(ROWS).arrays() | {"context": np.zeros(3)}
    store = RowStore.from_arrays(arrays)
    assert set(store.tokens) == {"input_ids", "token_type_ids"}
    assert set(store.labels) == {"start_positions"}


def test_saved_store_is_readable_by_safetensors(tmp_path: Path) -> None:
    """The form on disk is an open one."""
    from safetensors import safe_open

    store_of(ROWS).save(tmp_path / "rows.safetensors")
    with safe_open(tmp_path / "rows.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {"row_starts", "token.input_ids", "token.token_type_ids", "row.start_positions"}
