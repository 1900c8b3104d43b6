"""Print how far one changed row moves the others: whet's ways of running a batch, and what transformers offers.

`make test-leak` runs it: it fails if a single bit of another row moves in one of whet's ways. docs/leaks.md holds its
output. Families on the command line: these alone.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from leak_runs import EVERY, FORMATS, TASKS, WAYS, Moved, has_task, measure, moved
from peers import peers

_HEADER = ("", "logits", "gradients", "models x tasks")


def run(families: Sequence[str]) -> list[str]:
    """Print the table, at most 80 columns wide, line by line; return what of whet's own leaks."""
    leaks: list[str] = []
    print(_line(*_HEADER))
    for way in WAYS:
        for number_format in FORMATS:
            cells = [(family, task) for family in families for task in TASKS if has_task(family, task)]
            measured = {cell: measure(*cell, way, number_format) for cell in cells}
            found = {cell: one for cell, one in measured.items() if one is not None}
            leaks += [f"{way}, {number_format}, {cell}: {one}" for cell, one in found.items() if _leaks(one)]
            print(_line(f"whet {way}, {number_format}", *_largest([*found.values()]), str(len(found))), flush=True)
    for name, (model, rows) in peers().items():
        print(_line(name, *_largest([moved(model, rows, "tag")]), "1"), flush=True)
    return leaks


def _leaks(found: Moved) -> bool:
    """Return whether a single bit of another row moved, or nothing at all did: then nothing was measured."""
    return found.logits > 0.0 or found.gradients > 0.0 or not found.own > 0.0


def _largest(found: list[Moved]) -> tuple[str, str]:
    return _shown(max(one.logits for one in found)), _shown(max(one.gradients for one in found))


def _shown(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<46}{cells[0]:>8}{cells[1]:>11}{cells[2]:>15}"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = run(sys.argv[1:] or EVERY)
    for one in found:
        print(f"LEAK: {one}", file=sys.stderr)
    sys.exit(1 if found else 0)
