"""Strict JSON: what Python's parser accepts wrongly or crashes on is refused with its position; no NaN is written."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

_OR_STRING = r'"(?:[^"\\]|\\.)*+"|'
_CLOSING_BRACE = re.compile(_OR_STRING + r"(?P<found>\})", re.DOTALL)
_CONSTANT = re.compile(_OR_STRING + r"(?P<found>NaN|-?Infinity)", re.DOTALL)
_LONG_NUMBER = re.compile(_OR_STRING + r"(?P<found>-?\d{1000,})", re.DOTALL)


def with_plain_ends(lines: str) -> str:
    """Return JSON lines in which each end of a line but LF is escaped: Unicode knows more, and readers split at them.

    Such characters stand in texts alone, and JSON escapes the other ones there by itself.
    """
    for end in "\x85\u2028\u2029":
        lines = lines.replace(end, f"\\u{ord(end):04x}")
    return lines


class BadJson(Exception):  # noqa: N818 - whoever reads a file makes a WhetError of it
    """The text is not JSON. The caller adds the name of the file."""

    def __init__(self, what: str, *, why: str, fix: str, got: object = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.got = got


def parse_document(text: str) -> Any:
    """Return the one JSON value that the text holds; raise BadJson if there is none, or more text after it."""
    value, end = parse(text, skip_space(text))
    rest = skip_space(text, end)
    if rest != len(text):
        raise BadJson(
            f"{place_in(text, rest)}: the JSON ends here, but more text follows",
            got=text[rest : rest + 40],
            why="the file is one JSON document",
            fix="remove what follows",
        )
    return value


def parse(text: str, start: int = 0, *, in_lines: bool = False) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` and the index after it; raise BadJson if there is none.

    Also refused: NaN and Infinity, a duplicate key in an object, numbers too long for Python, and nesting too deep for
    it. Text after the value is left to the caller. `in_lines`: the file has a value on each line, so the fix names a
    command that checks such files.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise BadJson(
            f"{place_in(text, error.pos)}: not JSON: {error.msg}",
            got=text[max(error.pos - 20, 0) : error.pos + 20] or "the end of the text",
            why="a file that begins like JSON must be JSON up to its end",
            fix=f"write the file again, or correct this position ({_checker(text, in_lines)} checks it)",
        ) from None
    except RecursionError:
        raise BadJson(
            "objects or lists are nested too deep to be read",
            got=text[start : start + 40],
            why="valid data has only a few levels",
            fix="look for a list or an object that contains itself, and write the file again",
        ) from None
    except _ConstantError as error:
        _refuse_constant(text, start, str(error))
    except _DuplicateKeyError as error:
        _refuse_duplicate(text, start, str(error))
    except ValueError as error:
        _refuse_long_number(text, start, str(error))


def _checker(text: str, in_lines: bool) -> str:
    """Return the command that checks such a file: one value, or one on each line."""
    # read from its input: Python 3.13 closes a file that it is given before it has read the lines
    return "python -m json.tool --json-lines < FILE" if in_lines or _LINES.match(text) else "python -m json.tool FILE"


def skip_space(text: str, start: int = 0) -> int:
    """Return the index of the first character from `start` on that is not white space of JSON."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def number_or_null(value: Any) -> Any:
    """Return the value, or None for NaN and the infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def jsonable(value: Any) -> Any:
    """Return the value as JSON can hold it: arrays and tensors as lists, sets too, and what JSON has not as text."""
    if isinstance(value, dict):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    if isinstance(value, set | frozenset):
        return [jsonable(part) for part in sorted(value, key=str)]
    if value is None or isinstance(value, str | int | float):
        return value
    return jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)


def with_finite_numbers(value: Any) -> Any:
    """Return the value as JSON can hold it; NaN and the infinities are the texts NaN, Infinity and -Infinity."""
    value = jsonable(value)
    if isinstance(value, dict):
        return {name: with_finite_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_finite_numbers(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def place_in(text: str, index: int) -> str:
    """Return the line and column of this character, both counted from 1."""
    return f"line {text.count(chr(10), 0, index) + 1}, column {index - text.rfind(chr(10), 0, index)}"


class _ConstantError(Exception):
    pass


class _DuplicateKeyError(Exception):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _ConstantError(name)


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _DuplicateKeyError(counts.most_common(1)[0][0])
    return found


_LINES = re.compile(r"\s*\{[^\n]*\}[ \t\r]*\n\s*\{")
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _refuse_constant(text: str, start: int, name: str) -> NoReturn:
    raise BadJson(
        f"{place_in(text, _nth(_CONSTANT, text, start, 1))}: {name} is not JSON",
        why="JSON has no such number; only some programs write it",
        fix="write a number, or leave the field out",
    )


def _refuse_long_number(text: str, start: int, message: str) -> NoReturn:
    raise BadJson(
        f"{place_in(text, _nth(_LONG_NUMBER, text, start, 1))}: a number has too many digits",
        got=message,
        why="valid data has no number that large",
        fix="correct the number",
    )


def _refuse_duplicate(text: str, start: int, key: str) -> NoReturn:
    where = place_in(text, _nth(_CLOSING_BRACE, text, start, _objects_before_duplicate(text, start)))
    raise BadJson(
        f"the object that ends at {where} has the key {key!r} more than once",
        why="it is not clear which of the two values is meant",
        fix="keep one of them",
    )


def _objects_before_duplicate(text: str, start: int) -> int:
    """Parse again, and count the objects up to and including the one with the duplicate key."""
    n_ended = 0

    def count(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal n_ended
        n_ended += 1
        return _unique_keys(pairs)

    try:
        json.JSONDecoder(object_pairs_hook=count).raw_decode(text, start)
    except _DuplicateKeyError:
        return n_ended
    raise AssertionError("the second reading found no duplicate key")


def _nth(pattern: re.Pattern[str], text: str, start: int, n: int) -> int:
    """Return where the n-th match outside strings begins; the patterns match strings too, to skip them."""
    for match in pattern.finditer(text, start):
        n -= match["found"] is not None
        if n == 0:
            return match.start()
    return start
