"""whet's one logger, and how it looks on a terminal and in a file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

from whet.errors import WhetError, escape_controls, hide_secrets

logger = logging.getLogger("whet")


class _StandardError(logging.StreamHandler):
    """Writes to what standard error is at the moment: notebooks, and tests, put another in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        """Nothing to keep: the base class hands over what standard error was when it was made."""


class _Discreet(logging.Formatter):
    """Plain lines, and tracebacks, that show no secret and do not steer the terminal: values stay on their line."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple) and record.args:
            record = logging.makeLogRecord(record.__dict__ | {"args": tuple(map(_on_one_line, record.args))})
        return hide_secrets(escape_controls(super().format(record), keep="\n\t"))


def _on_one_line(value: object) -> object:
    """Return the value for a message: texts and paths come from data; an error of whet's has lines of its own."""
    if isinstance(value, WhetError):
        return value
    return escape_controls(str(value)) if isinstance(value, str | Path | BaseException) else value


def set_up(level: int = logging.INFO) -> None:
    """Send whet's messages to standard error, one plain line each; calling it again changes only the level."""
    logger.setLevel(level)
    if not logger.handlers:
        handler = _StandardError()
        handler.setFormatter(_Discreet("whet: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def set_level(name: str) -> None:
    """Show messages of this level and above, as `TrainingArguments.log_level` names it; passive changes nothing."""
    if name != "passive":
        logger.setLevel(name.upper())
