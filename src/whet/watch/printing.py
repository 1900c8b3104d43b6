"""Prints text for people: to standard output, or to standard error if JSON lines use standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from whet import console, log
from whet.config.arguments import TrainingArguments
from whet.config.ranks import here
from whet.errors import escape_controls
from whet.watch import run_log


@dataclass
class _Audience:
    shows: bool = True
    """Whether the first lines and the table of a run are printed: not with --log_level warning and above."""
    by_error: bool = False
    """Whether JSON lines use standard output."""
    table_follows: bool = False
    """Whether a task prints a table of all its results at its end."""


_audience = _Audience()


def configure(args: TrainingArguments) -> None:
    """Set the log level and the text output that these settings ask for."""
    log.set_level(args.log_level if here().is_first else "error")
    _audience.shows, _audience.by_error = log.speaks_to_people(args.log_level), args.log_format == "json"


@contextmanager
def before_a_table() -> Iterator[None]:
    """Do not print results within the block: a table after it shows them."""
    before, _audience.table_follows = _audience.table_follows, True
    try:
        yield
    finally:
        _audience.table_follows = before


def table_follows() -> bool:
    """Return whether a table shows the results later."""
    return _audience.table_follows and _audience.shows


def show_wrapped(text: str) -> None:
    """Print a text of one line, in lines that fit the terminal; names in it that come from data move no cursor."""
    show(console.paragraph(escape_controls(text), "  ").splitlines())


def show(lines: Sequence[str]) -> None:
    """Print these lines, and write them to run.log; ranks other than 0 print nothing."""
    run_log.write(lines)
    if _audience.shows and here().is_first:
        print("\n".join(lines), file=sys.stderr if _audience.by_error else sys.stdout, flush=True)
