"""How much memory this process may use, and how much it uses: the machine's, or the limit of its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def limit_bytes() -> int | None:
    """Return the memory this process may use: the machine's, or less where a cgroup sets a limit; None if unknown."""
    known = [limit for limit in (_machine_bytes(), _cgroup_bytes()) if limit]
    return min(known, default=None)


def resident_bytes() -> int | None:
    """Return the memory that this process holds now, None where the system does not tell."""
    return _kilobytes(_PROC / "self" / "status", "VmRSS")


def peak_bytes() -> int | None:
    """Return the most memory that this process has held so far, None where the system does not tell."""
    return _kilobytes(_PROC / "self" / "status", "VmHWM")


def _machine_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _cgroup_bytes() -> int | None:
    """Return the smallest limit on the way from this process's cgroup (v2, else v1) to the root."""
    limits = [_limit(folder / name) for folder in _cgroup_folders() for name in _LIMIT_FILES]
    return min((limit for limit in limits if limit is not None), default=None)


_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def _cgroup_folders() -> list[Path]:
    try:
        lines = (_PROC / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP / controllers if controllers else _CGROUP
            inside = place.strip("/")
            folders += [root / inside, *(root / parent for parent in Path(inside).parents)]
    return folders


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _kilobytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None
