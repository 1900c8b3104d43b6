"""R10, with a kernel that really kills: runs in a memory cgroup of their own, whose limit is smaller than they grow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from forked_runs import Corpus, assert_equal_runs, corpus, finish, whole
from memory_leak import MIB, leaking_run

from not_shown import not_shown
from whet.hardware.cgroup import ROOT, folders

__all__ = ["corpus", "whole"]  # fixtures

pytestmark = pytest.mark.reliability
LIMIT_MIB, LEAK_MIB = 448, 16
"""The run needs about 100 MiB of its own and does 44 micro-batches: the limit comes in the middle of it."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")


class Cgroup:
    """A folder of the kernel's in which processes share a limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def n_killed(self) -> int:
        """How many processes of it the kernel has ended for want of memory."""
        told = next(path for name in ("memory.events", "memory.oom_control") if (path := self.folder / name).exists())
        facts = dict(line.split() for line in told.read_text("utf-8").splitlines())
        return int(facts["oom_kill"])


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    """A new cgroup with a limit, below that of this process; skips where this user may make none."""
    for parent in folders("memory", ROOT)[:1]:
        folder = parent / f"whet-test-{os.getpid()}-{time.monotonic_ns()}"
        with suppress(OSError):
            folder.mkdir()
        try:
            limit = next((folder / name for name in _LIMITS if (folder / name).exists()), None)
            if limit is not None and _write(limit, str(LIMIT_MIB * MIB)):
                _write(folder / "memory.swap.max", "0")  # else the limit would only make it slow
                yield Cgroup(folder)
                return
        finally:
            with suppress(OSError):
                folder.rmdir()
    not_shown(
        "R10", "this user may make no cgroup with a memory limit", "root and a /sys/fs/cgroup that may be written to"
    )


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text, "utf-8")
    except OSError:
        return False
    return True


def test_the_guard_leaves_before_the_kernel_kills(corpus: Corpus, whole: Path, tmp_path: Path, cgroup: Cgroup) -> None:
    """No limit is given: it is found where the kernel keeps it."""
    words = corpus.words(tmp_path / "out")
    child = leaking_run(words, tmp_path / "log", LEAK_MIB, cgroup=cgroup.folder)
    assert child.wait() == 75, child.text()
    assert cgroup.n_killed == 0
    assert "no completed step is lost" in child.text()
    assert f"{LIMIT_MIB} MiB that the cgroup {cgroup.folder} allows" in child.text()
    finish([*words, "--resume_from_checkpoint", "auto"], tmp_path / "log2")
    assert_equal_runs(tmp_path / "out", whole)


def test_a_run_that_the_kernel_killed_goes_on(corpus: Corpus, whole: Path, tmp_path: Path, cgroup: Cgroup) -> None:
    """Without the guard: what was saved before is whole, and leads to the end of the run that nobody killed."""
    words = corpus.words(tmp_path / "out", save_steps=2)
    words_without = [*words, "--memory_limit_gb", "0"]
    child = leaking_run(words_without, tmp_path / "log", LEAK_MIB, cgroup=cgroup.folder)
    assert child.wait() == -signal.SIGKILL, child.text()
    assert cgroup.n_killed == 1
    assert list((tmp_path / "out").glob("checkpoint-*")), "it was killed before its first save: too early to tell"
    finish([*words, "--resume_from_checkpoint", "auto"], tmp_path / "log2")
    assert "resumes    after step" in (tmp_path / "log2").read_text("utf-8")
    assert_equal_runs(tmp_path / "out", whole)
