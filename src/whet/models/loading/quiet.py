"""Keep transformers' own bars and reports off the terminal while whet does the talking."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

_lock = threading.Lock()
_blocks: list[tuple[int, bool]] = []
"""What was set before the first of the blocks that run now, one entry a block: they may run in several threads."""


@contextmanager
def quiet() -> Iterator[None]:
    """Run the block without progress bars and warnings of transformers; both are as before afterwards."""
    with _lock:
        _blocks.append(_blocks[0] if _blocks else (logging.get_verbosity(), logging.is_progress_bar_enabled()))
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    finally:
        with _lock:
            verbosity, bars = _blocks.pop()
            if not _blocks:
                logging.set_verbosity(verbosity)
                if bars:
                    logging.enable_progress_bar()
