"""Merges an adapter again and again, and kills each merge at a later write: run by test_merge_writes.py.

    python killed_merges.py ADAPTER FOLDER

Prints a JSON list with, for each kill, the files that it left and the exit code of the same command after it; then how
merges end on a disk that refuses.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whet.cli.main import run
from whet.watch import files

_WRITES = ("mkdir", "touch", "replace", "unlink")
_EVERY = 4
"""Writes between two kills."""


def _kill_at(write: int, output: Path) -> None:
    """End this process by SIGKILL before so many writes to the folder."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *given: Any, **named: Any) -> Any:
            nonlocal count
            if path.is_relative_to(output):
                count += 1
                if count == write:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(path, *given, **named)

        return call

    for name in _WRITES:
        setattr(Path, name, counted(getattr(Path, name)))
    files.fsync = counted(files.fsync)


def _in_child(work: Callable[[], int]) -> int:
    """Return the exit code of the work in a process of its own, negative for a signal."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _files(output: Path) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in output.rglob("*")) if output.is_dir() else []


def _killed(adapter: str, folder: Path) -> list[dict[str, Any]]:
    found = []
    for write in range(1, 1000, _EVERY):
        output = folder / f"killed-{write}"
        words = ["merge", adapter, "--output_dir", str(output)]

        def merge(write: int = write, output: Path = output, words: list[str] = words) -> int:
            _kill_at(write, output)
            return run(words)

        code = _in_child(merge)
        if code == 0:
            return found
        left = _files(output)
        again = _in_child(lambda words=words: run(words))
        found.append({"code": code, "left": left, "again": again, "files": _files(output)})
    return found


def _refused(adapter: str, folder: Path, limit: int) -> dict[str, Any]:
    output = folder / f"full-{limit}"

    def merge() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return run(["merge", adapter, "--output_dir", str(output)])

    return {"code": _in_child(merge), "left": _files(output)}


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    place = Path(sys.argv[2])
    torch.set_num_threads(1)  # a fork has no threads
    run(["merge", sys.argv[1], "--output_dir", str(place / "plain")])  # imports everything, once for all forks
    found = {"plain": _files(place / "plain"), "killed": _killed(sys.argv[1], place)}
    found["full"] = [_refused(sys.argv[1], place, limit) for limit in (50, 2000, 20_000)]
    print(json.dumps(found))
