"""Lines in the log that show that work on texts moves: one long text is a single call that takes minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whet.log import logger

FIRST_S, INTERVAL_S = 4.0, 10.0
"""Seconds to the first line, and between those that follow."""


@contextmanager
def reported(n_all: int, doing: str = "tokenising", of: str = "characters") -> Iterator[Callable[[int], None]]:
    """Log how far the work on so many is, every ten seconds; yield what counts some as done."""
    done, ended, started_s = [0], threading.Event(), time.monotonic()

    def count(n_more: int) -> None:
        done[0] += n_more

    def report() -> None:
        pause_s = FIRST_S
        while not ended.wait(pause_s):
            pause_s = INTERVAL_S
            far = f"{done[0]:,} of {n_all:,} {of}"
            logger.info("%s: %s are done after %.0f s", doing, far, time.monotonic() - started_s)

    thread = threading.Thread(target=report, name="whet-tokenising", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
