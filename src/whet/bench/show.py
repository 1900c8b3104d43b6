"""The table on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from whet.bench.table import Line

_MIB = 2**20
_FILE_COLUMNS = 160


def show(found: Sequence[Line], n_steps: int) -> None:
    """Print the table to standard output: measurements, and what the guides say."""
    table = Table(caption="loss: = must equal another technique's, and does; != must and does not", box=None)
    for heading, justify in (
        ("technique", "left"),
        ("steps/s", "right"),
        ("of plain", "right"),
        ("peak MiB", "right"),
        ("of plain", "right"),
        (f"loss after {n_steps}", "right"),
        ("", "left"),
        ("the guides' claim, or the error", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for line in found:
        table.add_row(*cells(line))
    # A file or a pipe has no terminal width.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_COLUMNS, markup=False).print(table)


def cells(line: Line) -> list[str]:
    """Return the cells of one line of the table."""
    return [
        line.name,
        _shown(line.steps_per_s, "{:.2f}"),
        _shown(line.speed_ratio, "{:.2f}x"),
        _shown(None if line.peak_bytes is None else line.peak_bytes / _MIB, "{:,.0f}"),
        _shown(line.peak_ratio, "{:.2f}x"),
        _shown(line.loss, "{:.4f}"),
        {None: "", True: "=", False: "!="}[line.equal],
        _words(line),
    ]


def _words(line: Line) -> str:
    if line.error is not None:
        return f"{'WRONG' if line.equal is False else 'CANNOT RUN'}: {line.error}"
    return f"skipped: {line.skipped}" if line.skipped is not None else line.claim


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
