"""The cells of an Arrow table as Python values: equal texts are one object, and a bad cell is a value, not an error."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.data.files.bad_rows import Rejected

if TYPE_CHECKING:
    import pyarrow


_ITEM = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+"""
_PRINTED_ITEM = re.compile(_ITEM)
_PRINTED = re.compile(rf"\s*\[\s*(?:(?:{_ITEM})\s*(?:,\s*|(?=\])))*\]\s*")
"""A list as Python prints it, with a comma after each item: numpy's lists have none, and words would join."""


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for a cell that Arrow cannot convert, such as a text that is not UTF-8."""

    reason: str


def list_of_cell(cell: str) -> list[Any] | None:
    """Return the list that a cell of CSV holds, as JSON or as Python prints lists; None if it holds none."""
    try:
        found = json.loads(cell)
        return found if isinstance(found, list) else None
    except (ValueError, RecursionError):
        pass
    try:
        return [ast.literal_eval(one) for one in _PRINTED_ITEM.findall(cell)] if _PRINTED.fullmatch(cell) else None
    except (ValueError, SyntaxError):
        return None


def column_values(column: pyarrow.ChunkedArray) -> list[Any]:
    """Return the values of the column, row by row."""
    return [value for chunk in column.chunks for value in _chunk_values(chunk)]


def refuse_twice(names: Sequence[str]) -> None:
    """Refuse a table with two columns of the same name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Rejected(
            "columns have the same name", got=twice, why="it is not known which one is meant", fix="keep one of each"
        )


def text_bytes(array: pyarrow.Array) -> int:
    """Return how many bytes the texts in the array take when each is written out, also those within lists."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(array.type):
        if not _has_texts(array.dictionary.type):
            return 0
        return _sum(_lengths(array.dictionary).take(array.indices))
    if _has_texts(array.type):
        return _sum(_lengths(array))
    if isinstance(array, pyarrow.StructArray):
        return sum(map(text_bytes, array.flatten()))
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        return text_bytes(array.flatten())
    return 0


def _lengths(texts: pyarrow.Array) -> pyarrow.Array:
    from pyarrow import compute

    return compute.call_function("binary_length", [texts])


def _sum(numbers: pyarrow.Array) -> int:
    from pyarrow import compute

    return compute.call_function("sum", [numbers]).as_py() or 0


def _has_texts(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _chunk_values(chunk: pyarrow.Array) -> Iterator[Any]:
    from pyarrow import types

    if not types.is_dictionary(chunk.type):
        yield from _plain_values(chunk)
        return
    values = _plain_values(chunk.dictionary)
    for index in chunk.indices.to_pylist():
        inside = index is None or 0 <= index < len(values)
        yield (None if index is None else values[index]) if inside else Unreadable(f"entry {index} of {len(values)}")


def _plain_values(array: pyarrow.Array) -> list[Any]:
    try:
        return array.to_pylist()
    except Exception:  # of Arrow or of Python, depending on the type of the column
        return [_value(array, row) for row in range(len(array))]


def _value(array: pyarrow.Array, row: int) -> Any:
    try:
        return array[row].as_py()
    except Exception as error:
        return Unreadable(str(error) or type(error).__name__)
