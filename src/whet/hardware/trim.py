"""Returning freed memory to the system; glibc's allocator otherwise keeps it for later requests."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

from whet import system

_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_MAPS = Path("/proc/self/maps")


def why_not() -> str | None:
    """Return why this process cannot return freed memory; None if it can, because its allocator is glibc's."""
    if not system.is_linux():
        return f"{sys.platform} has no call for it; Linux with glibc has one"
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return "this system's C library has no malloc_trim; glibc has it"
    loaded = _MAPS.read_text("utf-8", "replace") if _MAPS.exists() else ""
    preloaded = (name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if "malloc" in name)
    found = next((name for name in _OTHER_ALLOCATORS if name in loaded), None) or next(preloaded, None)
    return found and f"{found} is the allocator of this process, and returns freed memory by its own rules"


def trim() -> Callable[[], None]:
    """Return the call that returns freed memory of this process; ask `why_not` first."""
    call = ctypes.CDLL(None).malloc_trim
    call.argtypes, call.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: call(0) and None
