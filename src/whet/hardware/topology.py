"""The machine as Linux describes it: sockets, NUMA nodes, physical cores, their threads and shared caches.

Everything is read from /proc and /sys below `root`, so that a copy of another machine's files can be read as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from whet.hardware.cgroup import ROOT, read_lines, read_words
from whet.hardware.cpu import cpu_list, numa_nodes

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, order=True)
class Core:
    """A physical core."""

    socket: int
    node: int
    """The NUMA node."""
    cache: int
    """The lowest CPU that shares the last level of cache with this core."""
    cpus: tuple[int, ...]
    """Its logical CPUs, lowest first: two with hyper-threading, else one."""


@dataclass(frozen=True)
class Topology:
    """The cores of a machine, or of the part that a process may use, by socket, node and cache."""

    cores: tuple[Core, ...]
    node_bytes: Mapping[int, int]
    """Memory of each NUMA node; nodes without CPUs (HBM, CXL) are in it too. Empty if the system does not report it."""

    @property
    def sockets(self) -> tuple[int, ...]:
        """The sockets that have cores here."""
        return tuple(dict.fromkeys(core.socket for core in self.cores))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have cores here."""
        return tuple(dict.fromkeys(core.node for core in self.cores))

    def of_node(self, node: int) -> tuple[Core, ...]:
        """Return the cores of a NUMA node."""
        return tuple(core for core in self.cores if core.node == node)

    def within(self, cpus: Collection[int]) -> Topology:
        """Return the part of the machine that consists of these logical CPUs."""
        kept = (replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in cpus)) for core in self.cores)
        return replace(self, cores=tuple(core for core in kept if core.cpus))


def read(root: Path = ROOT, cpus: Collection[int] | None = None) -> Topology:
    """Return the machine's topology; CPUs that are switched off are left out.

    `cpus` stands in for a system that does not describe its CPUs: each is taken for a core of one socket.
    """
    node_of = {cpu: node for node, own in numa_nodes(root).items() for cpu in own}
    folders = sorted(path for path in (root / _CPUS).glob("cpu[0-9]*") if path.name[3:].isdigit())
    cores = {core for folder in folders if (core := _core(folder, node_of)) is not None}
    if not cores:
        cores = {Core(0, 0, min(cpus or (0,)), (cpu,)) for cpu in cpus or (0,)}
    return Topology(tuple(sorted(cores)), _node_bytes(root))


def _core(folder: Path, node_of: Mapping[int, int]) -> Core | None:
    """Return the core that a logical CPU belongs to; None if the CPU is off."""
    if read_words(folder / "online") == ["0"]:
        return None
    number, about = int(folder.name[3:]), folder / "topology"
    names = ("core_cpus_list", "thread_siblings_list")  # the second is the name of older kernels
    siblings = next((found for name in names if (found := cpu_list(read_words(about / name)))), frozenset({number}))
    socket = next(iter(read_words(about / "physical_package_id")), "0")
    return Core(
        socket=max(int(socket), 0),  # some Arm firmware says -1: unknown
        node=node_of.get(number, 0),
        cache=_last_cache(folder / "cache", number),
        cpus=tuple(sorted(siblings)),
    )


def _last_cache(folder: Path, number: int) -> int:
    """Return the lowest CPU that shares the last level of cache; the CPU itself if the system does not report it."""
    shared = {
        int(words[0]): cpu_list(read_words(index / "shared_cpu_list"))
        for index in folder.glob("index[0-9]*")
        if (words := read_words(index / "level")) and words[0].isdigit()
    }
    return min(shared[max(shared)], default=number) if shared else number


def _node_bytes(root: Path) -> dict[int, int]:
    """Return the memory of each NUMA node."""
    found: dict[int, int] = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        for line in read_lines(folder / "meminfo"):
            words = line.split()
            if len(words) >= 4 and words[2] == "MemTotal:" and words[3].isdigit():
                found[int(folder.name[4:])] = int(words[3]) * 1024
    return dict(sorted(found.items()))
