"""whet's one logger, and how it looks on a terminal and in a file."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from whet import console
from whet.errors import WhetError, escape_controls, hide_secrets

logger = logging.getLogger("whet")
_PREFIX = "whet: "
_SHOWN_TO_PEOPLE = logging.INFO
"""A run prints its first lines and its table at this level and below: `--log_level warning` leaves them out."""


class _StandardError(logging.StreamHandler):
    """Writes to what standard error is at the moment: notebooks, and tests, put another in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        """Nothing to keep: the base class hands over what standard error was when it was made."""


class Discreet(logging.Formatter):
    """Plain lines, and tracebacks, that show no secret and do not steer the terminal: values stay on their line."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple) and record.args:
            record = logging.makeLogRecord(record.__dict__ | {"args": tuple(map(_on_one_line, record.args))})
        return hide_secrets(escape_controls(super().format(record), keep="\n\t"))


class _Folded(Discreet):
    """The same, with lines that are longer than the terminal folded between words; files get each on one line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not console.is_terminal(sys.stderr):
            return text
        indent = " " * len(_PREFIX)
        width = max(console.width(), 2 * len(_PREFIX))
        how = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        return "\n".join("\n".join(textwrap.wrap(line, width, **how) or [line]) for line in text.splitlines())


def _on_one_line(value: object) -> object:
    """Return the value for a message: texts and paths come from data; an error of whet's has lines of its own."""
    if isinstance(value, WhetError):
        return value
    return escape_controls(str(value)) if isinstance(value, str | Path | BaseException) else value


class _ToRoot(logging.Handler):
    """Stands for the loggers above whet's while its own level is lower than what they are to get."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.parent is not None:
            logger.parent.callHandlers(record)


_to_root = _ToRoot()
_shown_level: int | None = None
"""What people see while a file gets more; None while no file does, and the logger's own level decides."""


def set_up(level: int = logging.INFO) -> None:
    """Send whet's messages to standard error, one plain line each; calling it again changes only the level."""
    _show_from(level)
    if not logger.handlers or logger.handlers == [_to_root]:
        handler = _StandardError()
        handler.setFormatter(_Folded(f"{_PREFIX}%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def set_level(name: str) -> None:
    """Show messages of this level and above, as `TrainingArguments.log_level` names it; passive changes nothing."""
    if name != "passive":
        _show_from(logging.getLevelNamesMapping()[name.upper()])


def speaks_to_people(name: str) -> bool:
    """Return whether a run of this `log_level` prints its first lines and its table."""
    return name == "passive" or logging.getLevelNamesMapping()[name.upper()] <= _SHOWN_TO_PEOPLE


@contextmanager
def also_to(handler: logging.Handler) -> Iterator[None]:
    """Send every message from info on to this handler as well; what is shown elsewhere stays as it is."""
    global _shown_level
    if _shown_level is not None:
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
        return
    before, propagated = logger.level, logger.propagate
    _shown_level = logger.getEffectiveLevel()
    others = {one: one.level for one in logger.handlers}
    if propagated:
        logger.addHandler(_to_root)
        logger.propagate = False
    logger.addHandler(handler)
    _show_from(_shown_level)
    try:
        yield
    finally:
        shown, _shown_level = _shown_level, None
        for one in (handler, _to_root):
            logger.removeHandler(one)
        for one in logger.handlers:
            one.setLevel(others.get(one, logging.NOTSET))
        logger.propagate = propagated
        logger.setLevel(before if propagated and before == logging.NOTSET else shown)


def _show_from(level: int) -> None:
    """Show messages from this level on; a file that gets them from info on is no reason to show more."""
    global _shown_level
    if _shown_level is None:
        logger.setLevel(level)
        return
    _shown_level = level
    logger.setLevel(min(level, logging.INFO))
    for handler in logger.handlers:
        if isinstance(handler, _StandardError | _ToRoot):
            handler.setLevel(level)
