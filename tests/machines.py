"""Machines as their kernels describe them in /proc and /sys, written to a folder from a few facts about each.

The numbering of CPUs is that of the real machines: on Intel servers with hyper-threading the second threads follow all
cores of all sockets, on hybrid processors only the first cores have two threads, on AMD servers a last-level cache
belongs to a complex of 4 or 8 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a tree of /proc and /sys is made from."""

    cores: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    """(socket, node, cache group, logical CPUs) of each physical core."""
    node_bytes: dict[int, int] = field(default_factory=dict)
    off: frozenset[int] = frozenset()
    """CPUs that are switched off."""
    files: dict[str, str] = field(default_factory=dict)
    """More files, such as those of cgroups."""
    siblings_names: tuple[str, ...] = ("core_cpus_list", "thread_siblings_list")
    """Kernels before 5.2 have the second name alone."""

    def write(self, root: Path) -> Path:
        """Write the tree; return its root."""
        for socket, _, cache, cpus in self.cores:
            shared = [cpu for _, _, other, more in self.cores if other == cache for cpu in more]
            for cpu in cpus:
                self._write_cpu(root / f"sys/devices/system/cpu/cpu{cpu}", socket, cpus, shared)
        for node in {node for _, node, _, _ in self.cores} | self.node_bytes.keys():
            own = [cpu for _, home, _, cpus in self.cores if home == node for cpu in cpus if cpu not in self.off]
            folder = root / f"sys/devices/system/node/node{node}"
            _put(folder / "cpulist", listed(own))
            if node in self.node_bytes:
                _put(folder / "meminfo", f"Node {node} MemTotal:       {self.node_bytes[node] // 1024} kB\n")
        for name, text in self.files.items():
            _put(root / name, text)
        return root

    def _write_cpu(self, folder: Path, socket: int, cpus: tuple[int, ...], shared: list[int]) -> None:
        number = int(folder.name[3:])
        if number:
            _put(folder / "online", "0" if number in self.off else "1")
        if number in self.off:
            return  # the kernel removes the topology of a CPU that is off
        there = [cpu for cpu in cpus if cpu not in self.off]
        _put(folder / "topology/physical_package_id", str(socket))
        for name in self.siblings_names:
            _put(folder / "topology" / name, listed(there))
        for index, (level, group) in enumerate(((1, there), (1, there), (2, there), (3, shared))):
            _put(folder / f"cache/index{index}/level", str(level))
            _put(folder / f"cache/index{index}/shared_cpu_list", listed(group))


def listed(cpus: Iterable[int]) -> str:
    """Return numbers in the kernel's form `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) + "\n"


def xeon(sockets: int, cores: int, *, threads: int = 2, nodes_per_socket: int = 1, **more: object) -> Machine:
    """Intel servers: all first threads are numbered before all second ones; sub-NUMA clusters split a socket."""
    total, found = sockets * cores, []
    for core in range(total):
        socket, inside = divmod(core, cores)
        node = socket * nodes_per_socket + inside * nodes_per_socket // cores
        found.append((socket, node, socket, tuple(core + total * thread for thread in range(threads))))
    return Machine(tuple(found), **more)  # type: ignore[arg-type]


def epyc(sockets: int, cores: int, *, per_cache: int, nodes_per_socket: int = 1, **more: object) -> Machine:
    """AMD servers: numbered as Intel's, with a last-level cache for each complex of cores."""
    plain = xeon(sockets, cores, nodes_per_socket=nodes_per_socket)
    found = tuple((socket, node, cpus[0] // per_cache, cpus) for socket, node, _, cpus in plain.cores)
    return Machine(found, **more)  # type: ignore[arg-type]


def _cgroup_v2(quota: str, cpuset: str = "") -> dict[str, str]:
    own = "sys/fs/cgroup/kubepods.slice/pod1"
    return {"proc/self/cgroup": "0::/kubepods.slice/pod1\n", f"{own}/cpu.max": quota, f"{own}/cpuset.cpus": cpuset}


def _cgroup_v1(quota_us: int) -> dict[str, str]:
    own = "sys/fs/cgroup/cpu,cpuacct/docker/abc"
    return {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
        f"{own}/cpu.cfs_quota_us": str(quota_us), f"{own}/cpu.cfs_period_us": "100000",
    }  # fmt: skip


MACHINES: dict[str, Callable[[], Machine]] = {
    "laptop, hybrid": lambda: Machine(
        tuple((0, 0, 0, (2 * n, 2 * n + 1)) for n in range(6)) + tuple((0, 0, 0, (12 + n,)) for n in range(8)),
        {0: 32 * GIB},
    ),
    "one socket": lambda: xeon(1, 28, node_bytes={0: 192 * GIB}),
    "two sockets": lambda: xeon(2, 56, node_bytes={0: 512 * GIB, 1: 512 * GIB}),
    "two sockets, hyper-threads off": lambda: xeon(2, 20, threads=1, node_bytes={0: 96 * GIB, 1: 96 * GIB}),
    "two sockets, hyper-threads switched off": lambda: xeon(
        2, 4, off=frozenset(range(8, 16)), node_bytes={0: GIB, 1: GIB}
    ),
    "sub-NUMA clusters": lambda: xeon(2, 56, nodes_per_socket=4, node_bytes=dict.fromkeys(range(8), 64 * GIB)),
    "HBM as nodes without CPUs": lambda: xeon(1, 56, nodes_per_socket=4, node_bytes=dict.fromkeys(range(8), 16 * GIB)),
    "AMD, one node a socket": lambda: epyc(2, 64, per_cache=8, node_bytes={0: 256 * GIB, 1: 256 * GIB}),
    "AMD, four nodes a socket": lambda: epyc(1, 32, per_cache=4, nodes_per_socket=4),
    "Arm server": lambda: Machine(
        tuple((-1, 0, 0, (n,)) for n in range(64)), {0: 128 * GIB}, siblings_names=("thread_siblings_list",)
    ),
    "virtual machine without nodes": lambda: Machine(((0, 0, 0, (0,)), (0, 0, 0, (1,)))),
    "container with a quota of 6.5 cores": lambda: xeon(2, 28, files=_cgroup_v2("650000 100000")),
    "container of cgroup v1, 4 cores": lambda: xeon(1, 16, files=_cgroup_v1(400000)),
    "pod with a set of CPUs": lambda: xeon(2, 8, files=_cgroup_v2("max 100000", "4-7,20-23")),
}
"""Name -> machine."""


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
