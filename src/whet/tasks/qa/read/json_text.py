"""Strict JSON for the readers of questions: what is not JSON is Rejected, as any other bad data."""

from __future__ import annotations

from typing import Any

from whet import strict_json
from whet.strict_json import BadJson, place_in, skip_space
from whet.tasks.qa.read.rejected import Rejected

__all__ = ["parse_json", "place_in", "skip_space"]


def parse_json(text: str, start: int = 0, *, in_lines: bool = False) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` and the index of what follows; raise Rejected if there is none."""
    try:
        return strict_json.parse(text, start, in_lines=in_lines)
    except BadJson as problem:
        raise Rejected(problem.what, got=problem.got, why=problem.why, fix=problem.fix) from None
