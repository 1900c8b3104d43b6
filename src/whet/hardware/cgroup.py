"""The folders with the limits of this process's cgroup, version 1 or 2."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the folders of this process's cgroup and of its parents, the innermost first.

    Any of them may set a limit, and some may not exist. `controller` is "cpu", "memory" or "pids".
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            inside = Path(place.strip("/"))
            found += [top / one for one in (inside, *inside.parents)]
    return found


def read_words(path: Path) -> list[str]:
    """Return the words of a small file; none if it cannot be read."""
    try:
        return path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def read_lines(path: Path) -> list[str]:
    """Return the lines of a small file; none if it cannot be read."""
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
