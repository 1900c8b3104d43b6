"""How much memory this process may use, and how much it uses: the machine's, or the limit of its cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.hardware.cgroup import ROOT, folders, read_lines, read_words


@dataclass(frozen=True)
class MemoryLimit:
    """What a limit allows, and how much of it is taken."""

    used_bytes: int
    """What the kernel cannot take back by itself: what is in its file cache does not count."""
    limit_bytes: int
    of: str
    """Whose limit it is."""

    @property
    def left_bytes(self) -> int:
        """What can still be had before the kernel ends a process; below 0 where the limit is already passed."""
        return self.limit_bytes - self.used_bytes


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
    free = [limit.left_bytes for folder in limited_cgroups(root) if (limit := cgroup_memory_limit(folder)) is not None]
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


def memory_limits(cgroups: Sequence[Path] | None = None, root: Path = ROOT) -> list[MemoryLimit]:
    """Return the limits on this process: the machine's and its cgroups', with what all processes under each take now.

    `cgroups` are those of `limited_cgroups`, for a caller who looks often: looking them up takes longer than looking.
    """
    groups = limited_cgroups(root) if cgroups is None else cgroups
    found = [_machine_memory_limit(root), *(cgroup_memory_limit(folder) for folder in groups)]
    return [limit for limit in found if limit is not None]


def limited_cgroups(root: Path = ROOT) -> list[Path]:
    """Return the folders of the cgroups around this process that limit its memory; they stay the same in a run."""
    return list(dict.fromkeys(folder for folder, _ in _limits(root)))


def cgroup_memory_limit(folder: Path) -> MemoryLimit | None:
    """Return what the cgroup of this folder allows and takes; None where it sets no limit or does not tell."""
    limit = _limit_in(folder)
    used = next((size for name in _USE_FILES if (size := _number(folder / name)) is not None), None)
    if limit is None or used is None:
        return None
    return MemoryLimit(max(used - _file_cache_bytes(folder), 0), limit, f"the cgroup {folder}")


_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_USE_FILES = ("memory.current", "memory.usage_in_bytes")
_CACHE = ("inactive_file", "active_file", "slab_reclaimable")
"""What the kernel drops before it ends a process. cgroup v1 has a `total_` before each, with the groups inside."""
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def _machine_memory_limit(root: Path) -> MemoryLimit | None:
    """Return the machine's memory; what could be swapped out counts as free."""
    path = root / "proc/meminfo"
    total, available = _kilobytes(path, "MemTotal"), _kilobytes(path, "MemAvailable")
    if total is None or available is None:
        return None
    return MemoryLimit(total - available - (_kilobytes(path, "SwapFree") or 0), total, "this machine")


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, limit) of each cgroup around this process that has one."""
    for folder in folders("memory", root):
        if (limit := _limit_in(folder)) is not None:
            yield folder, limit


def _limit_in(folder: Path) -> int | None:
    limits = [limit for name in _LIMIT_FILES if (limit := _number(folder / name)) is not None and limit < _NO_LIMIT]
    return min(limits, default=None)


def _file_cache_bytes(folder: Path) -> int:
    pairs = [line.split() for line in read_lines(folder / "memory.stat")]
    found = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in _CACHE)


def _number(path: Path) -> int | None:
    words = read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _kilobytes(path: Path, name: str) -> int | None:
    found = [line.split() for line in read_lines(path) if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None
