"""Print how far 50 training steps of whet are from transformers' own, for each family and task.

`make test-parity` runs it: it fails if one loss of one run differs by more than the tolerance. docs/same-results.md
sums up its output. Families on the command line: these alone.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity_runs import EVERY, TASKS, TOLERANCE, WAYS, has_task, worst

_COLUMN = 9
_SHORT = {
    "several labels": "several",
    "regression": "number",
    "tokens": "tags",
    "masked words": "words",
    "next tokens": "next",
    "embeddings": "embed",
}
"""Tasks whose names are wider than a column."""


def run(families: Sequence[str]) -> list[str]:
    """Print the table line by line; return the runs that differ by more than the tolerance."""
    too_far: list[str] = []
    print(_line("", "", [_SHORT.get(task, task) for task in TASKS]))
    for family in families:
        found = {task: worst(family, task) for task in TASKS if has_task(family, task)}
        for way in WAYS:
            cells = [_shown(found[task][way]) if task in found else "-" for task in TASKS]
            print(_line(family if way == WAYS[0] else "", way, cells), flush=True)
            too_far += [
                f"{family}, {task}, {way}: {by_way[way]:.1e}"
                for task, by_way in found.items()
                if not by_way[way] <= TOLERANCE  # NaN is not
            ]
    return too_far


def _shown(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _line(family: str, way: str, cells: Sequence[str]) -> str:
    return f"{family:<19}{way:<14}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = run(sys.argv[1:] or EVERY)
    for one in found:
        print(f"TOO FAR: {one}", file=sys.stderr)
    sys.exit(1 if found else 0)
