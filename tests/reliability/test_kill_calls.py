"""R2: SIGKILL at every system call of a save that changes the disk; the newest good checkpoint loads, always."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import NEW, OLD, Saves, sweep
from harness import NO_STRACE, Fault, Server, at_once, count, ptrace_works

from not_shown import not_shown

pytestmark = pytest.mark.reliability


@pytest.mark.parametrize("how", ["plain", "rotated", "replaced"])
def test_killed_at_every_system_call(server: Server, tmp_path: Path, how: str) -> None:
    if not ptrace_works():
        not_shown("R2", *NO_STRACE)
    saves = Saves(server, tmp_path)
    kills = sweep(saves.calls(how), [None])
    seen: dict[str | None, int] = {}

    def survives(kill: Fault) -> bool:
        after = saves.with_fault(how, kill)
        seen[after.loads] = seen.get(after.loads, 0) + 1
        good = after.code == -9 and after.injected and after.loads is not None
        if not good:
            print(kill.injection, after)
        return good

    results = at_once(survives, kills)
    print(f"{how}: loads the old one {seen.get(OLD, 0)}, the new one {seen.get(NEW, 0)}, broken {seen.get(None, 0)}")
    assert seen.get(OLD)
    assert seen.get(NEW)
    count(f"killed at every system call ({how}), one whole checkpoint loads", results, len(kills))
