"""A run that keeps more memory after each micro-batch, in a process of its own.

    python memory_leak.py SETTINGS

SETTINGS is JSON: the words of the command, the MiB that each micro-batch keeps and, where a limit is wanted, the room
in MiB above what the process holds before the command, or the cgroup that it joins then. A forked process would not do:
it holds what earlier tests have left, as much as 3 GB, and gives some of that back at a time that nobody knows.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from forked_runs import HEAVY, Child, fork

MIB = 2**20


def leaking_run(
    words: list[str], log: Path, leak_mib: int, *, room_mib: int | None = None, cgroup: Path | None = None
) -> Child:
    """Start `whet qa` with these words in a new process, whose memory grows by `leak_mib` with each micro-batch."""
    settings = json.dumps({"words": words, "leak": leak_mib, "room": room_mib, "cgroup": cgroup and str(cgroup)})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # it reads modules of the tests
    return fork(lambda: os.execve(sys.executable, [sys.executable, __file__, settings], environment), log)


def limit_bytes(said: str) -> int:
    """Return the limit that a leaking run with room has printed."""
    return int(said.partition("limit ")[2].split()[0])


def peak_bytes(said: str) -> int:
    """Return the most that a leaking run has held, which it prints last."""
    return int(said.rpartition("peak ")[2])


def _leak(megabytes: int) -> None:
    """Make this process keep so much more memory after each micro-batch, really written to."""
    home = import_module("whet.objectives.span").PackedSpans
    real, kept = home.loss_sum, []

    def leaking(*given: Any) -> Any:
        kept.append(bytearray(os.urandom(4096)) * (megabytes * MIB // 4096))
        return real(*given)

    home.loss_sum = leaking


def _run(settings: dict[str, Any]) -> None:
    for name in HEAVY:
        import_module(name)
    memory = import_module("whet.hardware.memory")
    words = settings["words"]
    if settings["room"] is not None:
        limit = memory.resident_bytes() + settings["room"] * MIB
        print("limit", limit, flush=True)
        words = [*words, "--memory_limit_gb", str(limit / 2**30)]
    if settings["cgroup"] is not None:
        (Path(settings["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()), "utf-8")
    _leak(settings["leak"])
    try:
        import_module("whet.cli.main").main(words)
    finally:
        print("peak", memory.peak_bytes(), flush=True)


if __name__ == "__main__":
    _run(json.loads(sys.argv[1]))
