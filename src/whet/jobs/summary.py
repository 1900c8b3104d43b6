"""The end of a run, in one short table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from whet.errors import escape_controls
from whet.log import logger

Shown = Mapping[str, tuple[str, str]]
"""Name of a metric -> the words for it, and the format of its value."""


def show(shown: Shown, metrics: Mapping[str, float], folder: Path, total_s: float) -> None:
    """Print what the run reached, how fast, and where its files are."""
    rows = [(words, form.format(metrics[name])) for name, (words, form) in shown.items() if name in metrics]
    rows += [("everything", f"{total_s:,.1f} s"), ("files in", escape_controls(str(folder)))]
    # Where standard output is no terminal it holds JSON lines, so the words for people go to standard error.
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    if out is sys.stderr and not logger.isEnabledFor(logging.INFO):
        return
    for words, figure in rows:
        print(f"  {words:<22}{figure}", file=out)
