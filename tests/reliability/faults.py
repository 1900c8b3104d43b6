"""Saves with one fault each: which there are, and what is left on the disk after one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness import CHANGING_CALLS, Fault, Server, calls_in, same_folder, traced
from trials import OUT, REPLACED

from whet.store import find, write

ONE, TWO = "checkpoint-1", "checkpoint-2"
OLD, NEW = "old", "new"
_TRIES = 3


@dataclass(frozen=True)
class After:
    """What a save with a fault left behind."""

    code: int
    said: str
    loads: str | None
    """What the next run would go on from: OLD or NEW where it has the very bytes of it; None for anything else."""
    first_is_whole: bool
    left: tuple[str, ...]
    """Names in the output folder that are no checkpoints."""
    injected: bool
    """Whether the trace shows that the fault took place."""


class Saves:
    """Saves of a second checkpoint beside a first, each in a folder of its own."""

    def __init__(self, server: Server, place: Path) -> None:
        self.server, self.place, self._names = server, place, count()
        self.good: dict[str, Path] = {}

    def calls(self, how: str, wanted: Sequence[str] = CHANGING_CALLS) -> dict[str, int]:
        """Return how often a save uses each wanted system call; keeps its folder, without a fault, as `good`."""
        folder = self._folder(how)
        with traced(self.server, folder, None, how=how) as release:
            assert release() == 0
        self.good[how] = folder / OUT
        return calls_in(folder / "trace", wanted)

    def with_fault(self, how: str, fault: Fault) -> After:
        """Save with this fault; again, a few times, if the save had fewer calls than the one that counted them."""
        for _ in range(_TRIES - 1):
            found = self._with_fault_once(how, fault)
            if found.injected:
                return found
        return self._with_fault_once(how, fault)

    def _with_fault_once(self, how: str, fault: Fault) -> After:
        folder = self._folder(how)
        with traced(self.server, folder, fault, how=how) as release:
            code = release()
        trace = (folder / "trace").read_text("utf-8", errors="replace")
        return self._after(how, folder, code, "(INJECTED)" in trace or "killed by SIGKILL" in trace)

    def with_small_files(self, how: str, limit_bytes: int) -> After:
        """Save where no file may grow beyond the limit."""
        folder = self._folder(how)
        code = self.server.run("save_once", folder=str(folder), how=how, limit_bytes=limit_bytes)
        return self._after(how, folder, code, True)

    def _folder(self, how: str) -> Path:
        folder = self.place / f"{next(self._names)}"
        shutil.copytree(self.server.prepared / how, folder)
        return folder

    def _after(self, how: str, folder: Path, code: int, injected: bool) -> After:
        out = folder / OUT
        said = folder / "said.json"
        prepared = self.server.prepared / how / OUT
        left = tuple(sorted(path.name for path in out.iterdir() if path.name not in (ONE, TWO)))
        if how == REPLACED:
            write.clean_up(out)  # as every run does before it looks for a checkpoint
        found = find.newest(out)
        states = {OLD: prepared / (TWO if how == REPLACED else ONE), NEW: self.good[how] / TWO}
        after = After(
            code=code,
            said=json.loads(said.read_text("utf-8")) if said.exists() else "",
            loads=next((name for name, state in states.items() if found and _same(found, state)), None),
            first_is_whole=_same(out / ONE, prepared / ONE),
            left=left,
            injected=injected,
        )
        shutil.rmtree(folder)
        return after


def _same(found: Path, wanted: Path) -> bool:
    return found.name == wanted.name and found.is_dir() and not same_folder(found, wanted)


def sweep(calls: dict[str, int], errors: Sequence[str | None]) -> list[Fault]:
    """Return a fault for every use of every call, and every error."""
    return [Fault(call, k, error) for call, n in sorted(calls.items()) for k in range(1, n + 1) for error in errors]
