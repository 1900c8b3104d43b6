"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from whet import console
from whet.errors import escape_controls
from whet.hardware import memory

_LABEL = 24


def lines(
    shown: Mapping[str, tuple[str, str]],
    metrics: Mapping[str, float],
    folder: Path | str | None,
    total_s: float | None = None,
) -> list[str]:
    """Return the lines with the results of the run, its speed, the most memory it held, and the folder of its files.

    `shown` maps the name of a metric to its label and its format, in the order of the lines.
    """
    rows = [(words, form.format(metrics[name])) for name, (words, form) in shown.items() if name in metrics]
    if total_s is not None:
        rows.append(("everything", f"{total_s:,.1f} s"))
        if (peak := memory.peak_bytes()) is not None:
            rows.append(("peak memory (process)", console.amount(peak)))
    if folder is not None:
        room = console.width() - _LABEL - 2
        rows.append(("files in", console.shorten(escape_controls(str(folder)), room)))
    return [f"  {words:<{_LABEL}}{figure}" for words, figure in rows]
