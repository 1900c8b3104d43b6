"""whet's one logger, and how it looks on a terminal and in a file."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("whet")


def set_up(level: int = logging.INFO) -> None:
    """Send whet's messages to standard error, one plain line each; calling it again changes only the level."""
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("whet: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
