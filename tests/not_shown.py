"""Promises of the docs that a machine may be unable to show: named at the end, or failed where they have to be shown.

A promise whose tool is missing is skipped, so that the tests run anywhere. With WHET_GATE=1 in the environment it
fails: for a machine that is known to have all the tools.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

from whet.hardware import memory

_MARK = "not shown here"


def not_shown(rows: str, why: str, needs: str) -> NoReturn:
    """Skip the test of these rows of docs/reliability.md, or of another page, or fail it where WHET_GATE is 1.

    `needs` is what the machine lacks.
    """
    told = f"{rows} {_MARK}: {why}; needs {needs}"
    if os.environ.get("WHET_GATE") == "1":
        pytest.fail(f"{told} (WHET_GATE=1 asks for every row)", pytrace=False)
    pytest.skip(told)


def needs_free_memory(rows: str, needed_bytes: float) -> None:
    """Skip the test of these rows, or fail it where WHET_GATE is 1, if less memory than this is free."""
    free = memory.available_bytes()
    if free is not None and free < needed_bytes:
        not_shown(rows, f"{free / 1e9:,.1f} GB of memory are free", f"{needed_bytes / 1e9:,.0f} GB")


def open_rows(reports: Iterable[Any]) -> list[str]:
    """Return one line for each row that was skipped, with how many tests stand behind it."""
    told = [
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports if isinstance(report.longrepr, tuple)
    ]
    lines = [line for line in told if re.match(rf"(?:[RS]\d+|docs/\S+\.md).* {_MARK}: ", line)]
    return [f"{line} ({lines.count(line)} tests)" for line in sorted(set(lines))]
