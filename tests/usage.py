"""What a process uses: memory by the C library's count, processor time by the kernel's. For tests and benchmarks."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    ]


def counts_memory() -> bool:
    """Return whether `in_use_bytes` works here: glibc 2.33 and newer have the count."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def in_use_bytes() -> int:
    """Return what this process has allocated and not freed; torch's tensors on a CPU are part of it."""
    call = ctypes.CDLL(None).mallinfo2
    call.restype = _Heap
    gc.collect()
    heap = call()
    return heap.uordblks + heap.hblkhd


def cpu_s(process: int) -> float | None:
    """Return the processor time of a process; None once it has ended."""
    try:
        if Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()[0] == "Z":
            return None
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return None
