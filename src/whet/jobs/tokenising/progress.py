"""Lines in the log that show that tokenising moves: one long text is a single call that takes minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whet.log import logger

INTERVAL_S = 10.0


@contextmanager
def reported(n_chars: int) -> Iterator[Callable[[int], None]]:
    """Log how far the work on this many characters is, every ten seconds; yield what counts characters as done."""
    done, ended, started_s = [0], threading.Event(), time.monotonic()

    def count(n_more: int) -> None:
        done[0] += n_more

    def report() -> None:
        while not ended.wait(INTERVAL_S):
            far = f"{done[0]:,} of {n_chars:,} characters"
            logger.info("tokenising: %s are done after %.0f s", far, time.monotonic() - started_s)

    thread = threading.Thread(target=report, name="whet-tokenising", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
