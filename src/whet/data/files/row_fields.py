"""The fields of one row: their kinds of values, and texts that a tokenizer accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whet.data.files.bad_rows import Rejected
from whet.data.files.cells import Unreadable

_MOST_NAMED = 5
"""Fields in a message."""


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Return this field of the row: a text that is not blank and has only characters that tokenizers accept."""
    value = row.get(name)
    if not isinstance(value, str):
        raise Rejected(
            f"{name} is missing" if name not in row else f"{name} is {kind(value)}, not a text",
            got=sorted(map(str, row)) if name not in row else value,
            why=f"every row needs {name} as a text",
            fix=f"add {name}, as a text" if name not in row else _as_text(value),
        )
    if not value or value.isspace():
        raise Rejected(
            f"{name} is empty",
            got=value,
            why="there is nothing to read in it",
            fix="fill it, or remove what belongs to it",
        )
    if "\0" in value or not value.isascii():
        _refuse_bad_characters(name, value)
    return value


def _as_text(value: Any) -> str:
    """Return how to write what is no text as one."""
    if value is None or value != value:  # a gap, as null or NaN
        return "fill it in, or remove the row"
    if isinstance(value, bool | int | float):
        return f'write it as a text: "{json.dumps(value)}"'
    if isinstance(value, Mapping):
        texts = [str(part) for part, inner in value.items() if isinstance(inner, str)][:_MOST_NAMED]
        where = f", such as those of its field {' or '.join(texts)}" if texts else ""
        return f"write words alone, without the notation of an object{where}"
    if isinstance(value, list | tuple):
        return "write its words alone, as one text without the notation of a list"
    return "write it as a text" + (" in UTF-8, or remove the row" if isinstance(value, bytes | Unreadable) else "")


def object_of(row: Any, example: str) -> Mapping[str, Any]:
    """Return a row that is an object with named fields, as `example` is; raises Rejected for any other."""
    if isinstance(row, Rejected):
        raise row
    if not isinstance(row, Mapping):
        raise Rejected(
            f"this is {kind(row)}, not an object",
            got=row,
            why="a row is a JSON object with named fields",
            fix=f"write an object here: {example}",
        )
    return row


def kind(value: object) -> str:
    """Return what this value is, in the words of JSON."""
    if isinstance(value, Unreadable):
        return f"unreadable ({value.reason})"
    for types, words in _KINDS:
        if isinstance(value, types):
            return words
    return f"a {type(value).__name__}"


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"),
    (bool, "true or false"),
    (str, "a text"),
    (int, "a whole number"),
    (float, "a number with a fraction"),
    ((list, tuple), "a list"),
    (dict, "an object"),
)


def _refuse_bad_characters(name: str, value: str) -> None:
    try:
        value.encode()
        index = value.index("\0") if "\0" in value else -1
    except UnicodeEncodeError as error:
        index = error.start
    if index >= 0:
        raise Rejected(
            f"{name} holds the character U+{ord(value[index]):04X} at {index}",
            got=ascii(value[max(index - 20, 0) : index + 20]),
            why="half of a surrogate pair and the null character are no text; tokenizers fail on them",
            fix="remove it, or write the complete character",
        )
