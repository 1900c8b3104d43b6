"""Sockets, NUMA nodes, cores and threads of machines of many kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import GIB, MACHINES
from whet.hardware import cpu, topology

SIZES = {
    "laptop, hybrid": (1, 1, 14, 2),
    "one socket": (1, 1, 28, 2),
    "two sockets": (2, 2, 112, 2),
    "two sockets, hyper-threads off": (2, 2, 40, 1),
    "two sockets, hyper-threads switched off": (2, 2, 8, 1),
    "sub-NUMA clusters": (2, 8, 112, 2),
    "HBM as nodes without CPUs": (1, 4, 56, 2),
    "AMD, one node a socket": (2, 2, 128, 2),
    "AMD, four nodes a socket": (1, 4, 32, 2),
    "Arm server": (1, 1, 64, 1),
    "virtual machine without nodes": (1, 1, 2, 1),
    "container with a quota of 6.5 cores": (2, 2, 56, 2),
    "container of cgroup v1, 4 cores": (1, 1, 16, 2),
    "pod with a set of CPUs": (2, 2, 16, 2),
}
"""Machine -> sockets, nodes with CPUs, physical cores, threads of a core."""


@pytest.mark.parametrize("name", MACHINES)
def test_sockets_nodes_cores_and_threads_are_counted(name: str, tmp_path: Path) -> None:
    found = topology.read(MACHINES[name]().write(tmp_path))
    threads = max(len(core.cpus) for core in found.cores)
    assert (len(found.sockets), len(found.nodes), len(found.cores), threads) == SIZES[name]
    assert all(core in found.of_node(core.node) for core in found.cores)
    assert cpu.physical_cores({one for core in found.cores for one in core.cpus}, tmp_path) == len(found.cores)


def test_a_core_knows_its_socket_node_and_cache(tmp_path: Path) -> None:
    found = topology.read(MACHINES["AMD, four nodes a socket"]().write(tmp_path))
    first, last = found.cores[0], found.cores[-1]
    assert (first.cpus, first.node, first.cache) == ((0, 32), 0, 0)
    assert (last.cpus, last.node, last.cache) == ((31, 63), 3, 28)
    assert len({core.cache for core in found.of_node(2)}) == 2


def test_memory_of_nodes_is_read_even_of_those_without_cpus(tmp_path: Path) -> None:
    found = topology.read(MACHINES["HBM as nodes without CPUs"]().write(tmp_path))
    assert found.nodes == (0, 1, 2, 3)
    assert found.node_bytes == dict.fromkeys(range(8), 16 * GIB)


def test_the_part_that_a_process_may_use(tmp_path: Path) -> None:
    """The cores of a pod: both threads of four cores on the first socket."""
    machine = topology.read(MACHINES["pod with a set of CPUs"]().write(tmp_path))
    own = machine.within(set(range(4, 8)) | set(range(20, 24)))
    assert [core.cpus for core in own.cores] == [(4, 20), (5, 21), (6, 22), (7, 23)]
    assert own.sockets == own.nodes == (0,)
    assert [core.cpus for core in machine.within({9}).cores] == [(9,)]


def test_a_system_that_describes_nothing(tmp_path: Path) -> None:
    found = topology.read(tmp_path, cpus={3, 5})
    assert [core.cpus for core in found.cores] == [(3,), (5,)]
    assert found.nodes == found.sockets == (0,)


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/cpu0/topology").exists(), reason="needs Linux's /sys")
def test_this_machine() -> None:
    found = topology.read(cpus=cpu.usable_cpus())
    own = found.within(cpu.usable_cpus())
    assert len(own.cores) == cpu.physical_cores(cpu.usable_cpus())
