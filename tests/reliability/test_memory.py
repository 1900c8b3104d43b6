"""A run that comes near its memory limit warns, saves and leaves before the kernel ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_runs import Corpus, assert_equal_runs, corpus, finish, qa, whole
from memory_leak import MIB, leaking_run, limit_bytes, peak_bytes

from whet.config.arguments import TrainingArguments
from whet.hardware import memory
from whet.hardware.memory import MemoryLimit
from whet.watch import guard

__all__ = ["corpus", "whole"]  # fixtures


@pytest.mark.reliability
def test_a_run_that_grows_saves_and_leaves_and_goes_on(corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    words = corpus.words(tmp_path / "out")
    child = leaking_run(words, tmp_path / "log", 16, room_mib=500)
    assert child.wait() == 75, child.text()
    said = child.text()
    assert said.count("memory is getting scarce") == 1
    assert said.index("memory is getting scarce") < said.index("whet: stopped, as memory runs out")
    assert "no completed step is lost" in said
    assert "--per_device_train_batch_size 3 --gradient_accumulation_steps 4" in said
    finish([*words, "--resume_from_checkpoint", "auto"], tmp_path / "log2")
    assert_equal_runs(tmp_path / "out", whole)


@pytest.mark.reliability
def test_the_guard_comes_before_the_limit(corpus: Corpus, tmp_path: Path) -> None:
    """The process must never have held more than the limit: a kernel would have ended it there."""
    words = corpus.words(tmp_path / "out", num_train_epochs=40, max_steps=-1)
    child = leaking_run(words, tmp_path / "log", 4, room_mib=500)
    assert child.wait() == 75, child.text()
    limit, peak = limit_bytes(child.text()), peak_bytes(child.text())
    assert 0.8 * limit < peak < limit


@pytest.mark.reliability
def test_without_the_guard_it_runs_on(corpus: Corpus, tmp_path: Path) -> None:
    """What the two tests above see is the guard's doing."""
    child = leaking_run(corpus.words(tmp_path / "out", memory_limit_gb=0, max_steps=6), tmp_path / "log", 16)
    assert child.wait() == 0, child.text()


@pytest.mark.reliability
def test_no_step_fits(corpus: Corpus, tmp_path: Path) -> None:
    """Going on in the same way would end in the same way: no 75, which asks a scheduler for just that."""
    for attempt in range(2):  # what the first leaves does not keep the second from starting
        child = qa(corpus.words(tmp_path / "out", memory_limit_gb=0.05), tmp_path / f"log{attempt}")
        assert child.wait() == 1, child.text()
        assert "error: memory runs out before the first step is done" in child.text()
        assert "--memory_limit_gb" in child.text().partition("  fix: ")[2]
        assert "start again with the same command" not in child.text()
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run.jsonl", "run.log"]


def _guard(left_mib: int, *, limit_mib: int = 1000, holds_mib: int = 800, peaks_mib: tuple[int, ...] = (0,)) -> Any:
    peaks = iter([*peaks_mib, *[peaks_mib[-1]] * 10])
    return guard.MemoryGuard(
        limits=lambda: [MemoryLimit((limit_mib - left_mib) * MIB, limit_mib * MIB, "a test")],
        resident=lambda: holds_mib * MIB,
        peak=lambda: next(peaks) * MIB,
    )


@pytest.mark.parametrize(
    ("left_mib", "stops", "warns"), [(160, False, False), (140, False, True), (51, False, True), (49, True, False)]
)
def test_at_15_percent_it_warns_and_at_5_it_stops(
    left_mib: int, stops: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = _guard(left_mib).shortage()
    assert (found is not None, bool(caplog.messages)) == (stops, warns)


def test_a_small_process_on_a_full_machine_goes_on() -> None:
    """3 % of a large machine are left, which is more than a process of 200 MiB will take."""
    assert _guard(left_mib=3_000, limit_mib=100_000, holds_mib=200).shortage() is None
    assert _guard(left_mib=3_000, limit_mib=100_000, holds_mib=60_000).shortage() is not None


def test_what_a_micro_batch_takes_at_its_highest_counts() -> None:
    """Between two of them 120 MiB are left, but one has taken 100 of those; a peak before the run does not count."""
    assert _guard(left_mib=120, peaks_mib=(0, 900)).shortage() is not None
    assert _guard(left_mib=120, peaks_mib=(900, 900)).shortage() is None


def test_it_looks_no_more_often_than_it_should() -> None:
    looks: list[int] = []
    often = guard.MemoryGuard(limits=lambda: looks.append(1) or [])  # type: ignore[func-returns-value]
    for _ in range(1000):
        often.shortage()
    assert len(looks) < 1000 * guard.LEAST_INTERVAL_S


def test_it_looks_again_before_fast_growth_uses_up_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB each millisecond, as fast steps take them: at the usual interval it would find nothing left."""
    now = {"s": 0.0}
    monkeypatch.setattr(guard.time, "monotonic", lambda: now["s"])

    def used() -> int:
        return 400 * MIB + int(now["s"] * 1000) * 16 * MIB

    limits = lambda: [MemoryLimit(used(), 1600 * MIB, "a test")]  # noqa: E731
    watching = guard.MemoryGuard(limits=limits, resident=used, peak=used)
    while watching.shortage() is None:
        now["s"] += 0.001
        assert used() < 1600 * MIB, "it noticed nothing"


def test_zero_switches_it_off() -> None:
    assert guard.memory_guard(0) is None
    assert guard.memory_guard(TrainingArguments().memory_limit_gb) is not None


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A folder in place of the kernel's files."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def test_a_limit_of_cgroup_v2(system: Path) -> None:
    """As of kernel 6: the parent limits, and what is in the file cache is not taken."""
    _write(system / "proc/self/cgroup", "0::/pod/run\n")
    _write(system / "sys/fs/cgroup/pod/run/memory.max", "max\n")
    _write(system / "sys/fs/cgroup/pod/memory.max", "1000\n")
    _write(system / "sys/fs/cgroup/pod/memory.current", "900\n")
    _write(system / "sys/fs/cgroup/pod/memory.stat", "anon 300\nfile 550\ninactive_file 400\nactive_file 150\n")
    assert memory.memory_limits(root=system) == [MemoryLimit(350, 1000, f"the cgroup {system / 'sys/fs/cgroup/pod'}")]
    assert memory.memory_limits(root=system)[0].left_bytes == 650


def test_a_limit_of_cgroup_v1(system: Path) -> None:
    _write(system / "proc/self/cgroup", "4:memory:/job\n3:cpuset:/\n0::/\n")
    _write(system / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    _write(system / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000\n")
    _write(system / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "900\n")
    stat = "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n"
    _write(system / "sys/fs/cgroup/memory/job/memory.stat", stat)
    assert [(room.used_bytes, room.limit_bytes) for room in memory.memory_limits(root=system)] == [(600, 1000)]


def test_the_machine_itself(system: Path) -> None:
    _write(system / "proc/meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\nSwapFree: 500 kB\n")
    assert memory.memory_limits(root=system) == [MemoryLimit(4500 * 1024, 8000 * 1024, "this machine")]


def test_this_machine_tells_something() -> None:
    holds = memory.resident_bytes()
    assert holds is not None
    for room in memory.memory_limits():
        assert room.used_bytes > 0
        assert room.limit_bytes > holds // 2
