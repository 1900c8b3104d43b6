"""How much memory this process may use, and how much it uses: the machine's, or the limit of its cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from whet.hardware.cgroup import ROOT, folders, read_lines, read_words


def limit_bytes(root: Path = ROOT) -> int | None:
    """Return the memory this process may use: the machine's, or less where a cgroup sets a limit; None if unknown.

    `root` is where /proc and /sys are, here and below.
    """
    known = [limit for limit in (machine_bytes(root), cgroup_bytes(root)) if limit]
    return min(known, default=None)


def machine_bytes(root: Path = ROOT) -> int | None:
    """Return the machine's memory, None if unknown."""
    found = _kilobytes(root / "proc/meminfo", "MemTotal")
    if found is not None:
        return found
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def cgroup_bytes(root: Path = ROOT) -> int | None:
    """Return the smallest limit on the way from this process's cgroup (v2, else v1) to the root; None: no limit."""
    return min((limit for _, limit in _limits(root)), default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return what can be allocated now without swapping: on the machine, and within each cgroup's limit."""
    free = [limit - _in_use(folder) for folder, limit in _limits(root)]
    on_machine = _kilobytes(root / "proc/meminfo", "MemAvailable")
    known = [*free, *([] if on_machine is None else [on_machine])]
    return max(min(known), 0) if known else None


def resident_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that this process holds now, None where the system does not tell."""
    return _kilobytes(root / "proc/self/status", "VmRSS")


def peak_bytes(root: Path = ROOT) -> int | None:
    """Return the most memory that this process has held so far, None where the system does not tell."""
    return _kilobytes(root / "proc/self/status", "VmHWM")


def huge_pages(root: Path = ROOT) -> str | None:
    """Return who gets transparent huge pages: `always`, `madvise` (who asks) or `never`; None if unknown."""
    words = read_words(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, limit) of each cgroup around this process that has one."""
    for folder in folders("memory", root):
        for name in _LIMIT_FILES:
            limit = _number(folder / name)
            if limit is not None and limit < _NO_LIMIT:
                yield folder, limit


def _in_use(folder: Path) -> int:
    """Return what the cgroup holds, without file pages that the kernel would give back."""
    held = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stats = dict(line.split()[:2] for line in read_lines(folder / "memory.stat") if len(line.split()) > 1)
    return held - int(stats.get("total_inactive_file", stats.get("inactive_file", "0")))


def _number(path: Path) -> int | None:
    words = read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _kilobytes(path: Path, name: str) -> int | None:
    found = [line.split() for line in read_lines(path) if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None
