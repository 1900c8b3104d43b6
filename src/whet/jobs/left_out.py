"""Bad rows that a run with --skip_bad leaves out: named in the log and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from whet.data.files.bad_rows import MAX_SHOWN
from whet.errors import Problem
from whet.log import logger
from whet.train.output import files as output_files

_LONGEST_GOT = 300


def log(split: str, problems: Sequence[Problem], n_rows: int, rows: str) -> None:
    """Log how many rows of the split were left out, and the first reasons."""
    if problems:
        logger.warning("%s: %d %s are bad and were left out:", split, n_rows, rows)
    for problem in problems[:MAX_SHOWN]:
        logger.warning("  %s", problem.what)
    if len(problems) > MAX_SHOWN:
        logger.warning("  and %d problems more", len(problems) - MAX_SHOWN)


def write(problems: Sequence[Problem], path: Path) -> None:
    """Write what was left out and why, one object each; no file where nothing was."""
    if not problems:
        return
    told = [asdict(one) | {"got": None if one.got is None else str(one.got)[:_LONGEST_GOT]} for one in problems]
    with output_files.stored(f"{path.name} cannot be written", path.parent):
        output_files.write_text(path, json.dumps(told, indent=2) + "\n")
