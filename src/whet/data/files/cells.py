"""The cells of an Arrow table as Python values: equal texts are one object, and a bad cell is a value, not an error.

`datasets` writes a column of JSON whose values are not all of one type as JSON texts (arrow.json): these are parsed, so
that readers find the values of the data.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from whet import strict_json
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
    values = [value for chunk in column.chunks for value in _chunk_values(chunk)]
    parser = _json_parser(column.type)
    return values if parser is None else list(map(parser, values))


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
    if isinstance(array, pyarrow.ExtensionArray):
        return text_bytes(array.storage)
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


def holds_json(kind: pyarrow.DataType) -> bool:
    """Return whether values of this type are JSON texts (arrow.json), or hold some."""
    return _json_parser(kind) is not None


def _json_parser(kind: pyarrow.DataType) -> Callable[[Any], Any] | None:
    """Return what parses the JSON texts within a value of this type; None if it holds none."""
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _parsed
    if types.is_struct(kind):
        fields = {one.name: parser for one in kind if (parser := _json_parser(one.type)) is not None}
        return partial(_parsed_fields, fields) if fields else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parser = _json_parser(kind.value_type)
        return None if parser is None else partial(_parsed_items, parser)
    return None


def _parsed(text: Any) -> Any:
    """Return the value that a JSON text holds."""
    if not isinstance(text, str):
        return text
    try:
        return strict_json.parse_document(text)
    except strict_json.BadJson as problem:
        return Unreadable(problem.what)


def _parsed_fields(parsers: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: parsers[name](one) if name in parsers else one for name, one in value.items()}


def _parsed_items(parser: Callable[[Any], Any], value: Any) -> Any:
    return list(map(parser, value)) if isinstance(value, list) else value


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
