"""whet's log as the library leaves it: earlier tests may have run a command, which sets it up for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from whet.log import logger


@pytest.fixture(autouse=True)
def _log_of_a_library() -> Iterator[None]:
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    logger.handlers.clear()
    logger.propagate = True
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
