"""Memory limits: this machine's own, and those of cgroups of both versions in a folder made to look like one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from whet.hardware import memory

_GIB = 2**30


def _root(folder: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A /proc with 8 GiB of memory, 6 of them free, and the files of /sys/fs/cgroup."""
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    texts |= {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {6 * 2**20} kB\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_machine_memory_equals_that_of_free() -> None:
    """The first column of `free`, which has its own reading of the same file."""
    shown = subprocess.run(["free", "-b"], capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("there is no free here")
    total = int(shown.stdout.splitlines()[1].split()[1])
    assert memory.machine_bytes() == total
    assert memory.machine_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_limit_is_at_most_the_machines() -> None:
    limit, free = memory.limit_bytes(), memory.available_bytes()
    assert limit is not None
    assert free is not None
    assert 0 <= free <= limit <= (memory.machine_bytes() or 0)


def _in_a_process_of_its_own(code: str) -> list[int]:
    """Return the numbers that this code prints: in the tests' process, other threads allocate and free meanwhile."""
    code = "import mmap, resource\nfrom whet.hardware import memory\n" + code
    return [int(one) for one in subprocess.check_output([sys.executable, "-c", code], text=True).split()]


def test_touched_memory_is_resident_and_the_peak_stays() -> None:
    before, held, peak, kernels = _in_a_process_of_its_own("""
before = memory.resident_bytes()
with mmap.mmap(-1, 64 * 2**20) as block:
    block.write(b"\\1" * len(block))
    held = memory.resident_bytes()
peak = memory.peak_bytes()
print(before, held, peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
""")
    assert held - before == pytest.approx(64 * 2**20, rel=0.1)
    assert peak >= 0.99 * held  # the kernel adds up its threads' counts now and then, not at every page
    # the kernel's other count, which nobody can set back as this one; it may move between the two readings
    assert peak <= kernels * 1.05


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": f"{2 * _GIB}\n"}, 2 * _GIB),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * _GIB}\n"}, 3 * _GIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{2 * _GIB}\n", "a/memory.max": f"{_GIB}\n"}, _GIB),
        ("0::/\n", {"memory.max": f"{_GIB}\n"}, _GIB),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a\n", {"a/memory.max": f"{2 * _GIB}\n", "a/memory.high": f"{_GIB}\n"}, _GIB),
        ("0::/a\n", {"a/memory.max": f"{_GIB}\n", "a/memory.high": "max\n"}, _GIB),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.high": f"{3 * _GIB}\n"}, 3 * _GIB),
        ("0::/a\n", {}, None),
        ("5:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{_GIB}\n"}, _GIB),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": f"{_GIB}\n"}, _GIB),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("4:cpu:/x\n", {"cpu/x/memory.max": f"{_GIB}\n"}, None),
        ("0::/a\n", {"a/memory.max": f"{16 * _GIB}\n"}, 16 * _GIB),
    ],
)
def test_cgroup_limits_are_read(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    root = _root(tmp_path, cgroup, files)
    assert memory.cgroup_bytes(root) == limit
    assert memory.limit_bytes(root) == min(limit or 8 * _GIB, 8 * _GIB)


def test_available_memory_respects_the_cgroups_limit(tmp_path: Path) -> None:
    """Pages of files that nobody uses any more count as free: the kernel gives them back."""
    files = {"a/memory.max": f"{4 * _GIB}", "a/memory.current": f"{3 * _GIB}", "a/memory.stat": "anon 7\n"}
    root = _root(tmp_path, "0::/a", files)
    assert memory.available_bytes(root) == _GIB
    (root / "sys/fs/cgroup/a/memory.stat").write_text(f"anon 7\ninactive_file {2 * _GIB}\n")
    assert memory.available_bytes(root) == 3 * _GIB
    (root / "sys/fs/cgroup/a/memory.high").write_text(f"{2 * _GIB}")
    assert memory.available_bytes(root) == _GIB, "from there on the kernel slows a run down"
    (root / "sys/fs/cgroup/a/memory.high").write_text("max")
    (root / "sys/fs/cgroup/a/memory.max").write_text("max")
    assert memory.available_bytes(root) == 6 * _GIB


def test_available_memory_respects_cgroup_version_1(tmp_path: Path) -> None:
    files = {"x/memory.limit_in_bytes": f"{4 * _GIB}", "x/memory.usage_in_bytes": f"{3 * _GIB}"}
    files |= {"x/memory.stat": f"inactive_file 0\ntotal_inactive_file {_GIB}\n"}
    root = _root(tmp_path, "4:memory:/x", {f"memory/{name}": text for name, text in files.items()})
    assert memory.available_bytes(root) == 2 * _GIB


def test_a_run_may_hold_what_every_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a/memory.max": f"{4 * _GIB}", "a/memory.current": f"{3 * _GIB}", "a/memory.stat": "anon 7\n"}
    root = _root(tmp_path, "0::/a", files)
    held = {"held_bytes": _GIB // 2, "root": root}
    assert memory.free_bytes(root=root) == _GIB
    assert memory.free_bytes(**held) == 1.5 * _GIB
    assert memory.free_bytes(**held, limit_gb=0.75) == 0.75 * _GIB
    assert memory.free_bytes(**held, limit_gb=0) == 1.5 * _GIB, "0 switches the guard off"
    monkeypatch.setattr(memory, "address_space_bytes", lambda: 2 * _GIB)
    assert memory.free_bytes(**held, unheld_bytes=_GIB) == _GIB
    assert memory.free_bytes(**held, unheld_bytes=3 * _GIB) == 0


def test_addresses_without_memory_are_counted() -> None:
    before, reserved, written = _in_a_process_of_its_own("""
before = memory.unheld_bytes()
with mmap.mmap(-1, 64 * 2**20) as block:
    reserved = memory.unheld_bytes()
    block.write(b"\\1" * len(block))
    written = memory.unheld_bytes()
print(before, reserved, written)
""")
    assert reserved - before == pytest.approx(64 * 2**20, rel=0.1)
    assert written - before == pytest.approx(0, abs=6 * 2**20)


@pytest.mark.parametrize(
    ("text", "found"), [("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), ("", None)]
)
def test_huge_pages_setting_is_read(tmp_path: Path, text: str, found: str | None) -> None:
    path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert memory.huge_pages(tmp_path) == found


def test_unknown_system_gives_none(tmp_path: Path) -> None:
    assert memory.resident_bytes(tmp_path) is None
    assert memory.peak_bytes(tmp_path) is None
    assert memory.cgroup_bytes(tmp_path) is None
    assert memory.available_bytes(tmp_path) is None
    assert memory.huge_pages(tmp_path) is None


def test_smallest_limit_on_threads_of_the_cgroups_counts(tmp_path: Path) -> None:
    root = _root(tmp_path, "0::/a/b\n", {"a/b/pids.max": "max\n", "a/pids.max": "64\n", "pids.max": "512\n"})
    assert memory.thread_limits(root)["pids.max of the cgroup"] == 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limited = soft if soft != resource.RLIM_INFINITY else None
    assert memory.thread_limits(root).get("ulimit -u") == limited


def test_lack_of_threads_is_no_lack_of_memory() -> None:
    for error in (RuntimeError("can't start new thread"), BlockingIOError(11, "Resource temporarily unavailable")):
        found = memory.lack(error)
        assert found is not None
        assert found.problems[0].what == "no more threads or processes can be started"
    assert memory.lack(BlockingIOError(11, "write could not complete without blocking", 3)) is None
