"""Cores, quotas, nodes and instruction sets: this machine's own, and those of folders made to look like another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from whet.hardware import cpu, gpu, openmp

pytestmark = pytest.mark.true_start

linux = pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux's /proc")


def _hyper_threaded(root: Path, n_cores: int) -> Path:
    """CPU c and CPU c + n_cores are the two threads of one core."""
    for number in range(2 * n_cores):
        first = number % n_cores
        _put(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", f"{first},{first + n_cores}\n")
    return root


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@linux
def test_feature_flags_are_common_to_all_processors() -> None:
    """Read by another program: grep."""
    shown = subprocess.run(["grep", "-m1", "-E", "^(flags|Features)", "/proc/cpuinfo"], capture_output=True, text=True)
    assert cpu.features() == set(shown.stdout.partition(":")[2].split())
    has, lacks = cpu.instruction_sets()
    flags = {name: flag for flag, name in cpu.INSTRUCTION_SETS.items()}
    assert all(f" {flags[name]} " in f"{shown.stdout.strip()} " for name in has)
    assert not any(f" {flags[name]} " in f"{shown.stdout.strip()} " for name in lacks)


@linux
@pytest.mark.skipif(len(cpu.usable_cpus()) < 2, reason="needs two CPUs")
def test_affinity_changes_the_number_of_cores() -> None:
    code = (
        "import os; from whet.hardware import cpu\n"
        "before = cpu.usable_cores(); os.sched_setaffinity(0, {min(cpu.usable_cpus())})\n"
        "print(before, cpu.usable_cores(), len(cpu.usable_cpus()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, cpus = map(int, done.stdout.split())
    assert (after, cpus) == (1, 1)
    assert 1 <= before <= (os.cpu_count() or 1)


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    root = _hyper_threaded(tmp_path, 4)
    assert cpu.physical_cores(range(8), root) == 4
    assert cpu.physical_cores([0, 4], root) == 1
    assert cpu.physical_cores([0, 5], root) == 2


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert cpu.physical_cores(range(6), tmp_path) == 6


@pytest.mark.parametrize(
    ("cgroup", "files", "quota", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "200000 100000\n"}, 2.0, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "350000 100000"}, 3.5, 3),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/a", {"a/cpu.max": "max 100000"}, None, 4),
        ("3:cpu,cpuacct:/x", {"cpu,cpuacct/x/cpu.cfs_quota_us": "150000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
         1.5, 1),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None, 4),
        ("3:cpuacct:/x", {"cpuacct/x/cpu.max": "100000 100000"}, None, 4),
        ("0::/a", {"a/cpu.max": "900000 100000"}, 9.0, 4),
    ],
)  # fmt: skip
def test_cgroup_quotas_limit_the_cores(
    tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None, cores: int
) -> None:
    _put(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        _put(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu.quota_cores(tmp_path) == quota
    assert cpu.usable_cores(tmp_path, range(4)) == cores


def test_numa_nodes_without_cpus_are_skipped(tmp_path: Path) -> None:
    for number, cpus in enumerate(["0-2,6\n", "3-5\n", "\n"]):
        _put(tmp_path / f"sys/devices/system/node/node{number}/cpulist", cpus)
    assert cpu.numa_nodes(tmp_path) == {0: {0, 1, 2, 6}, 1: {3, 4, 5}}


def test_arm_instruction_sets_are_recognised(tmp_path: Path) -> None:
    _put(tmp_path / "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16\n")
    assert cpu.instruction_sets(tmp_path) == (["NEON", "SVE", "bf16"], ["int8 matrix"])
    assert cpu.vendor(tmp_path) == ""  # only x86 has this line


def test_vendor_is_read_from_the_processor(tmp_path: Path) -> None:
    _put(tmp_path / "proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n")
    assert cpu.vendor(tmp_path) == "AuthenticAMD"


def test_gpus_of_the_driver_are_listed(tmp_path: Path) -> None:
    assert gpu.nvidia_gpus(tmp_path) == []
    place = tmp_path / "proc/driver/nvidia/gpus"
    _put(place / "0000:01:00.0/information", "Model: \t\t NVIDIA A100\nIRQ: 12\n")
    assert gpu.nvidia_gpus(tmp_path) == ["NVIDIA A100"]


def test_openmp_libraries_are_files_not_names(tmp_path: Path) -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 11 /opt/torch/lib/libgomp-a34b3233.so.1\n"
        "7f01-7f02 r--p 00000000 08:01 11 /opt/torch/lib/libgomp-a34b3233.so.1\n"
        "7f02-7f03 r--p 00000000 08:01 11 /usr/lib/libgomp.so.1\n"
        "7f03-7f04 r--p 00000000 08:01 12 /opt/intel/libiomp5.so\n"
        "7f04-7f05 r--p 00000000 08:01 13 /usr/lib/libcompress.so\n"
        "7f05-7f06 rw-p 00000000 00:00 0\n"
    )
    _put(tmp_path / "proc/self/maps", maps)
    assert openmp.libraries(tmp_path) == ["/opt/intel/libiomp5.so", "/opt/torch/lib/libgomp-a34b3233.so.1"]


@pytest.mark.slow
def test_no_openmp_before_torch() -> None:
    code = (
        "from whet.hardware import openmp; a = openmp.libraries(); import torch; print(len(a), len(openmp.libraries()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs Linux's /proc")
    before, after = map(int, done.stdout.split())
    assert before == 0
    assert after <= 1
