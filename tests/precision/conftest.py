"""What the tests of number formats share: operators with and without the native library, whet's log as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiny import operators
from whet.log import logger

__all__ = ["operators"]


@pytest.fixture(autouse=True)
def _log_of_a_library() -> Iterator[None]:
    """A command that ran before has set the log up for a terminal."""
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    logger.handlers.clear()
    logger.propagate = True
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
