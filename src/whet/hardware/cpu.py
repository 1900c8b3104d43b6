"""The processor, and the part that this process may use: affinity, cgroup quota, cores, NUMA nodes."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from whet import system
from whet.hardware.cgroup import ROOT, folders, read_lines, read_words

INSTRUCTION_SETS: dict[str, str] = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
    "i8mm": "int8 matrix",
}
"""The kernel's name of each instruction set that speeds up training -> its usual name; the last four are Arm's."""
X86_ONLY = 7
"""How many of INSTRUCTION_SETS, counted from the first, are x86's."""


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    return system.usable_cpus()


def physical_cores(cpus: Collection[int], root: Path = ROOT) -> int:
    """Return the number of physical cores of these logical CPUs; hyper-threads of one core count once."""
    topology = root / "sys/devices/system/cpu"
    if root == ROOT and not topology.exists() and (known := system.physical_cores()) is not None:
        return min(known, len(cpus))
    siblings = {cpu: read_words(topology / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return len({words[0] if words else str(cpu) for cpu, words in siblings.items()})


def quota_cores(root: Path = ROOT) -> float | None:
    """Return the cores that the cgroups grant: the smallest quota of this one and its parents; None: no limit."""
    quotas = [_quota(folder) for folder in folders("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return how many threads can compute at once without sharing a core: at least 1."""
    physical = physical_cores(usable_cpus() if cpus is None else cpus, root)
    quota = quota_cores(root)
    return physical if quota is None else max(1, min(physical, int(quota)))


def numa_nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Return the NUMA nodes that have CPUs: number -> its CPUs. Empty if the system does not report them."""
    nodes = {
        int(folder.name.removeprefix("node")): cpu_list(read_words(folder / "cpulist"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    return {number: cpus for number, cpus in sorted(nodes.items()) if cpus}


def cpu_list(words: list[str]) -> frozenset[int]:
    """Return the numbers in the kernel's form `0-3,8`; none for an empty list."""
    found: set[int] = set()
    for part in (words[0] if words else "").split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def model_name(root: Path = ROOT) -> str:
    """Return the processor's own name."""
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def vendor(root: Path = ROOT) -> str:
    """Return the processor's vendor by its own name ("GenuineIntel", "AuthenticAMD"), "" if unknown."""
    return _cpuinfo(root, "vendor_id")


def features(root: Path = ROOT) -> frozenset[str]:
    """Return the processor's feature flags, in the kernel's names."""
    return frozenset((_cpuinfo(root, "flags") or _cpuinfo(root, "Features")).split())


def instruction_sets(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return the instruction sets that speed up training: those that this processor has, and those that it lacks.

    None of either if the system does not report them.
    """
    has = features(root)
    if not has:
        return [], []
    of_x86 = list(INSTRUCTION_SETS)[:X86_ONLY]
    of_its_kind = list(INSTRUCTION_SETS)[X86_ONLY:] if "asimd" in has else of_x86
    names = [(flag in has, INSTRUCTION_SETS[flag]) for flag in of_its_kind]
    return [name for there, name in names if there], [name for there, name in names if not there]


def load() -> float | None:
    """Return how many threads of the machine wanted to run, on average over the last minute; None if unknown."""
    return system.load()


def running_threads(root: Path = ROOT) -> int | None:
    """Return how many threads of the machine run or want to run now, this one among them; None if unknown."""
    found = [line.split() for line in read_lines(root / "proc/stat") if line.startswith("procs_running ")]
    return int(found[0][1]) if found else None


def _quota(folder: Path) -> float | None:
    words = read_words(folder / "cpu.max")
    if not words:  # version 1
        words = [*read_words(folder / "cpu.cfs_quota_us"), *read_words(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return None  # `max`, or -1
    return int(words[0]) / int(words[1])


def _cpuinfo(root: Path, name: str) -> str:
    for line in read_lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
