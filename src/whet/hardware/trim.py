"""Freed memory goes back to the system, where the allocator is glibc's: it keeps it otherwise, for the next request."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_MAPS = Path("/proc/self/maps")


def why_not() -> str | None:
    """Return why this process cannot return freed memory, None where it can: its allocator is glibc's own."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no call for it; it takes Linux and glibc"
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return "this system's C library has no malloc_trim; it takes glibc"
    loaded = _MAPS.read_text("utf-8", "replace") if _MAPS.exists() else ""
    preloaded = (name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if "malloc" in name)
    found = next((name for name in _OTHER_ALLOCATORS if name in loaded), None) or next(preloaded, None)
    return found and f"{found} serves this process's memory, and it returns freed memory by its own rules"


def trim() -> Callable[[], None]:
    """Return the call that returns freed memory of this process; ask `why_not` first."""
    call = ctypes.CDLL(None).malloc_trim
    call.argtypes, call.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: call(0) and None
