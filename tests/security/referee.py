"""Runs one job in a process of its own under an audit hook, and writes down what the hook saw.

Watched are: names that pickle looks up, shells, commands, connections, and files that are opened. A file counts as
outside unless it lies in the place of the job, belongs to the interpreter or to an installed package, is a file of the
system's own (below /proc, /sys, /dev, /usr, /lib, /etc), or is whet's. The hook sees Python's own calls; what a library
in Rust opens it does not, so jobs also check that a folder was refused before such a library had it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

_SEEN: dict[str, list[str]] = {"pickle": [], "commands": [], "connections": [], "opened": []}
_EVENTS = {
    "pickle.find_class": "pickle", "os.system": "commands", "subprocess.Popen": "commands", "os.exec": "commands",
    "os.posix_spawn": "commands", "socket.connect": "connections", "socket.getaddrinfo": "connections",
}  # fmt: skip
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/usr/", "/lib", "/etc/")
_OWN = tuple({str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())})
_WATCHING = True


def _hook(event: str, facts: tuple[Any, ...]) -> None:
    if not _WATCHING:
        return
    if event == "open" and isinstance(facts[0], str | bytes):
        _SEEN["opened"].append(os.fsdecode(facts[0]))
    elif event in _EVENTS:
        _SEEN[_EVENTS[event]].append(f"{event} {facts!r}"[:300])


def outside(places: list[Path], own: tuple[str, ...] = ()) -> list[str]:
    """Return the files that were opened and lie in none of these places, and forget all that were opened."""
    global _WATCHING
    _WATCHING = False
    allowed = tuple(str(place.resolve()) for place in places) + _OWN + _SYSTEM + own
    found = {str(Path(path).resolve()) for path in _SEEN["opened"]}
    _SEEN["opened"].clear()
    _WATCHING = True
    return sorted(path for path in found if not path.startswith(allowed))


def main(report: str, job: str, *words: str) -> None:
    """Run the job; write its report."""
    import jobs

    result = getattr(jobs, job)(*map(Path, words))
    seen = {name: events for name, events in _SEEN.items() if name != "opened"}
    Path(report).write_text(json.dumps({"result": result, "seen": seen}), "utf-8")


def peak_mib() -> float:
    """Return the most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now_s() -> float:
    """Return a clock that only goes forward."""
    return time.perf_counter()


if __name__ == "__main__":
    sys.modules["referee"] = sys.modules["__main__"]
    sys.addaudithook(_hook)
    main(*sys.argv[1:])
