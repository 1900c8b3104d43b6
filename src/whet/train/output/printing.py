"""Where the words for people go: standard output; standard error where JSON lines have standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from whet import log
from whet.config.arguments import TrainingArguments
from whet.train.output import run_log


@dataclass
class _Audience:
    shows: bool = True
    """Whether the first lines and the table of a run are wanted: not with --log_level warning and above."""
    by_error: bool = False
    """Whether standard output belongs to JSON lines."""
    table_follows: bool = False
    """Whether a task prints a table of all its results at its end."""


_audience = _Audience()


def configure(args: TrainingArguments) -> None:
    """Show what runs with these settings are to show: messages from their level on, and the words for people."""
    log.set_level(args.log_level)
    _audience.shows, _audience.by_error = log.speaks_to_people(args.log_level), args.log_format == "json"


@contextmanager
def before_a_table() -> Iterator[None]:
    """Within the block, leave results to the table that follows it."""
    before, _audience.table_follows = _audience.table_follows, True
    try:
        yield
    finally:
        _audience.table_follows = before


def table_follows() -> bool:
    """Return whether results come in a table later."""
    return _audience.table_follows and _audience.shows


def show(lines: Sequence[str]) -> None:
    """Print these lines, and put them into the run's log."""
    run_log.write(lines)
    if _audience.shows:
        print("\n".join(lines), file=sys.stderr if _audience.by_error else sys.stdout, flush=True)
