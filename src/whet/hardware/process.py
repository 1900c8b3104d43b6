"""What Linux does to a process by itself: ends it with its parent, and first of all when memory runs out."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_LIBRARY = ctypes.CDLL(None)
"""Loaded before a fork: a child that has just been forked loads nothing."""
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent, which has this number, ends; False if it has ended already."""
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    return os.getppid() == parent


def go_first() -> None:
    """Have the kernel end this process before all others when memory runs out, where it may be asked."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
