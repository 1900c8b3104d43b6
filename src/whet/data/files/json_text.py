"""Strict JSON and JSON lines for the readers of files: text that is not JSON is Rejected, like other bad data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whet import strict_json
from whet.data.files.bad_rows import Rejected
from whet.strict_json import BadJson, place_in, skip_space

__all__ = ["json_lines", "parse_json", "place_in", "skip_space"]


def parse_json(text: str, start: int = 0, *, in_lines: bool = False) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` and the index after it; raise Rejected if there is none."""
    try:
        return strict_json.parse(text, start, in_lines=in_lines)
    except BadJson as problem:
        raise Rejected(problem.what, got=problem.got, why=problem.why, fix=problem.fix) from None


def json_lines(text: str) -> Iterator[tuple[str, Any]]:
    """Yield every line's position and value; raise Rejected at the first line that is not JSON."""
    for n, line in enumerate(text.split("\n"), start=1):
        begin = skip_space(line)
        if begin == len(line):
            continue
        try:
            row, end = parse_json(line, begin, in_lines=True)
        except Rejected as problem:
            problem.what = f"line {n} of the JSON lines: {problem.what.removeprefix('line 1, ')}"
            raise
        if skip_space(line, end) != len(line):
            raise Rejected(
                f"line {n} holds more than one JSON value",
                got=line[end : end + 40],
                why="in JSON lines each line is one row",
                fix="write one object a line, or one JSON document in all",
            )
        yield f"line {n}", row
