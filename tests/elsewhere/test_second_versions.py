"""The versions of whet.system for a system that lacks a part, next to what Linux says of the same thing."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet import system
from whet.hardware import cpu, memory, network

pytest.importorskip("psutil")  # before what it needs on Linux is taken away


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A system without fcntl and resource, and what else the test takes away."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    system._part.cache_clear()
    yield monkeypatch
    system._part.cache_clear()


def test_file_without_posix_fallocate_has_its_size_on_the_disk(lacking: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking.delattr(os, "posix_fallocate")
    size = 3 * 2**20 + 5
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        system.allocate_on_disk(file.fileno(), size)
        status = os.fstat(file.fileno())
    assert status.st_size == size
    assert status.st_blocks * 512 >= size  # a file with holes would end the process once the disk is full


def test_link_is_not_followed_without_o_nofollow(lacking: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking.delattr(os, "O_NOFOLLOW")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("text", "utf-8")
    os.close(system.open_plain(tmp_path / "file", os.O_RDONLY))
    with pytest.raises(OSError, match="link") as caught:
        system.open_plain(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert caught.value.errno == errno.ELOOP


def test_memory_is_that_of_proc(lacking: pytest.MonkeyPatch) -> None:
    """psutil reads the same counts as whet does on Linux, a moment later."""
    assert system.resident_bytes() == pytest.approx(memory.resident_bytes(), rel=0.1)
    assert system.available_bytes() == pytest.approx(memory.available_bytes(), rel=0.3)  # other programs use it
    assert system.machine_bytes() == memory.machine_bytes()
    lacking.delattr(os, "sysconf")
    assert system.machine_bytes() == memory.machine_bytes()


@pytest.mark.parametrize(("platform", "unit_bytes"), [("linux", 1024), ("darwin", 1)])
def test_peak_has_the_unit_of_the_system(platform: str, unit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", platform)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert system.peak_bytes() == pytest.approx(kilobytes * unit_bytes, rel=0.05)


def test_limits_that_do_not_exist_are_none(lacking: pytest.MonkeyPatch) -> None:
    assert [system.soft_limit(of) for of in ("AS", "DATA", "NPROC")] == [None] * 3
    system.set_soft_limit("AS", 1)
    system.dump_no_core()
    with system.limited_addresses(1) as is_limited:
        assert not is_limited
        assert len(bytearray(2**20)) == 2**20
    lacking.delattr(signal, "setitimer")
    with system.alarms(1e-3, lambda *_: pytest.fail("nothing calls")) as is_watched:
        assert not is_watched
        time.sleep(0.01)


def test_limit_is_lifted_after_the_block() -> None:
    before = system.soft_limit("AS")
    with system.limited_addresses(1 << 40) as is_limited:
        assert is_limited
        assert system.soft_limit("AS") is not None
    assert system.soft_limit("AS") == before


def test_cores_and_addresses_are_those_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus, addresses = cpu.usable_cpus(), network.addresses()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu.usable_cpus() == cpus
    assert network.addresses() == addresses
    assert not system.can_bind()
    with pytest.raises(OSError, match="darwin"):
        system.bind(cpus)


def test_instruction_sets_that_are_not_known_are_not_called_lacking(tmp_path: Path) -> None:
    assert cpu.instruction_sets(tmp_path) == ([], [])


_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
print(child.pid, file=sys.stderr, flush=True)
time.sleep(100)
"""


@pytest.mark.true_start
@pytest.mark.parametrize("has_groups", [True, False])
def test_process_is_killed_with_what_it_has_started(
    has_groups: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_groups:
        monkeypatch.delattr(os, "fork")
        monkeypatch.delattr(os, "killpg")
    with (tmp_path / "errors").open("w+b") as errors:
        parent = system.start_apart([sys.executable, "-S", "-c", _PARENT], errors)
    until = time.monotonic() + 30
    while not (told := (tmp_path / "errors").read_text("utf-8")).endswith("\n") and time.monotonic() < until:
        time.sleep(0.02)
    system.kill_apart(parent)
    assert parent.wait(30) == -signal.SIGKILL
    while _runs(int(told)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(int(told))


def _runs(number: int) -> bool:
    """Return whether the process computes still; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
