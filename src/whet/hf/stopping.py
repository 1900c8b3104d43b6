"""SIGTERM and Ctrl-C during `whet.Trainer.train()`: training saves the completed steps, and then stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from whet.errors import EXIT_STOPPED_AND_SAVED
from whet.watch.stop import Stopped

_SAME_S = 1.0
"""Signals within this time of the first count as the same request: launchers and terminals often send two."""
_KILLED = 128


class Signals:
    """Which signal asked for a stop, if any has."""

    requested: str | None = None
    _first_s: float | None = None

    def on_signal(self, number: int, _frame: Any) -> None:
        """Note the first signal; a later one ends training at once."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s, self.requested = now_s, signal.Signals(number).name
            with suppress(OSError):
                text = f"whet: heard {self.requested}: training saves and stops; once more ends it at once\n"
                os.write(2, text.encode())
        elif now_s - self._first_s >= _SAME_S:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_KILLED + number)


@contextmanager
def noted() -> Iterator[Signals]:
    """Note SIGTERM and SIGINT within the block; a signal that the program handles itself stays with it.

    Python allows handlers in the main thread alone: in another thread nothing is noted.
    """
    found, before = Signals(), {}
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == usual:
                before[number] = signal.signal(number, found.on_signal)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped(why: str, name: str | None, step: int, folder: Path | None) -> BaseException:
    """Return the exception that ends training: KeyboardInterrupt after Ctrl-C, else Stopped with exit code 75."""
    if folder is not None:
        what = f"{why} after step {step}: saved in {folder}, no completed step is lost"
    else:
        what = f"{why} after step {step}: nothing is saved" if step else f"{why} before the first step was done"
    again = {} if folder is None else {"resume_from_checkpoint": str(folder)}
    return KeyboardInterrupt(what) if name == "SIGINT" else Stopped(what, again, EXIT_STOPPED_AND_SAVED)
