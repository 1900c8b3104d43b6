"""Which cores each rank of a host gets: by default one rank for each NUMA node, on its physical cores.

A rank that crosses NUMA nodes reads half of its memory through the link between sockets, and two threads on one
physical core share its product units. So ranks are dealt to nodes, and threads to physical cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from whet.errors import ConfigError
from whet.hardware.topology import Core, Topology

_KEPT_FREE_FROM = 8
"""Cores of a rank from which one of them is left for communication: with fewer, it would cost too much of the rank."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank of a host runs on."""

    local_rank: int
    cores: tuple[Core, ...]
    """The physical cores that it may run on. They are its own, unless a quota grants fewer than there are."""
    n_threads: int
    """Threads that compute."""
    kept_free: int
    """Cores left for communication, loader processes and the system."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """The logical CPUs that the rank is bound to: the first thread of each of its cores."""
        return tuple(sorted(core.cpus[0] for core in self.cores))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes of its cores."""
        return tuple(dict.fromkeys(core.node for core in self.cores))


def plan_ranks(
    topology: Topology, *, quota_cores: float | None = None, n_ranks: int | None = None, kept_free: int | None = None
) -> tuple[RankPlan, ...]:
    """Return the plan of a host's ranks.

    `topology` is the part of the machine that may be used, `quota_cores` what a cgroup grants of it. `n_ranks` None is
    one for each NUMA node, `kept_free` None leaves one core of a rank to communication where it has eight or more and
    is not alone. Raises ConfigError if there are not enough cores.
    """
    n_usable = _usable(topology, quota_cores)
    count = _usual_ranks(topology, n_usable) if n_ranks is None else n_ranks
    _require_enough(count, n_usable, topology, quota_cores)
    return tuple(
        _plan(number, cores, min(n_usable // count, len(cores)), kept_free, alone=count == 1)
        for number, cores in enumerate(_dealt(topology, count))
    )


def _plan(number: int, cores: tuple[Core, ...], share: int, asked: int | None, *, alone: bool) -> RankPlan:
    """Return the plan of one rank that may compute on `share` of these cores at once."""
    wanted = asked if asked is not None else int(not alone and share >= _KEPT_FREE_FROM)
    free = min(wanted, share - 1)
    return RankPlan(number, cores, share - free, free)


def _usable(topology: Topology, quota_cores: float | None) -> int:
    """Return how many cores can compute at once; a quota is rounded down, or its last thread would stand still."""
    cores = len(topology.cores)
    return cores if quota_cores is None else max(1, min(cores, floor(quota_cores)))


def _usual_ranks(topology: Topology, n_usable: int) -> int:
    """Return one rank for each NUMA node; with a quota, as many as fill nodes."""
    per_node = len(topology.cores) / len(topology.nodes)
    return min(len(topology.nodes), max(1, int(n_usable / per_node)))


def _require_enough(count: int, n_usable: int, topology: Topology, quota_cores: float | None) -> None:
    if 1 <= count <= n_usable:
        return
    quota = "" if quota_cores is None else f", a quota of {quota_cores:g} cores"
    raise ConfigError(
        what=f"{count} ranks do not fit on this machine",
        got=f"{len(topology.cores)} physical cores that this process may use{quota}",
        why="each rank needs a physical core of its own: two ranks on one core take its time from each other",
        fix=f"use --nproc_per_node auto, or a number from 1 to {n_usable}; a host of --hosts or --hostfile that has a "
        f"number of its own: NAME:{n_usable}",
    )


def _dealt(topology: Topology, count: int) -> list[tuple[Core, ...]]:
    """Return the cores of each rank: complete nodes where that is possible, else even parts of each node."""
    nodes = [topology.of_node(node) for node in topology.nodes]
    if count <= len(nodes):
        return [_joined(nodes[start:end]) for start, end in _parts(len(nodes), count)]
    ranks_of = _spread(count, [len(cores) for cores in nodes])
    return [
        cores[start:end] for cores, own in zip(nodes, ranks_of, strict=True) for start, end in _parts(len(cores), own)
    ]


def _spread(count: int, sizes: Sequence[int]) -> list[int]:
    """Return how many ranks each node gets: each next rank goes where most cores are left for one."""
    found = [0] * len(sizes)
    for _ in range(count):
        best = max(range(len(sizes)), key=lambda n: (sizes[n] / (found[n] + 1), -n))
        found[best] += 1
    return found


def _parts(size: int, count: int) -> list[tuple[int, int]]:
    """Return `count` even ranges of `size` items; none for no parts."""
    return [(size * n // count, size * (n + 1) // count) for n in range(count)]


def _joined(nodes: Sequence[tuple[Core, ...]]) -> tuple[Core, ...]:
    return tuple(core for node in nodes for core in node)
