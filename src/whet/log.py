"""whet's one logger, and how it looks on a terminal and in a file."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from whet.errors import hide_secrets

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
    """Plain lines, and tracebacks, that show no secret."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_secrets(super().format(record))


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
