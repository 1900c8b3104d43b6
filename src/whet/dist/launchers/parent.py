"""The process that started all ranks of this machine: they have it in common, also behind scripts of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")


def launcher_pid(rank_variables: Mapping[str, str]) -> int:
    """Return the nearest process above this one that is no part of the rank.

    Parts of the rank, such as a script that does not `exec` its last command, have the rank's variables; the launcher
    has not. One that cannot be read belongs to somebody else, such as the system's scheduler.
    """
    found = os.getppid()
    while rank_variables and found > 1 and rank_variables.items() <= _environment(found).items():
        above = _parent(found)
        if above is None:
            break
        found = above
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in data.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, _, value in entries}


def _parent(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])
