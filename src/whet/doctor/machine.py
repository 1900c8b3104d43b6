"""Processor, memory and disk, without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from whet.doctor.findings import Machine
from whet.hardware import cpu, gpu, memory
from whet.hardware.cgroup import ROOT


def examine(root: Path = ROOT) -> Machine:
    """Return what this process may use of the machine; `root` contains /proc and /sys."""
    cpus = cpu.usable_cpus()
    has, lacks = cpu.instruction_sets(root)
    return Machine(
        processor=cpu.model_name(root),
        usable_cpus=len(cpus),
        usable_cores=cpu.usable_cores(root, cpus),
        quota_cores=cpu.quota_cores(root),
        numa_nodes=sum(1 for node in cpu.numa_nodes(root).values() if node & cpus),
        instruction_sets=has,
        lacking=lacks,
        load=cpu.load(),
        memory_bytes=memory.machine_bytes(root),
        memory_limit_bytes=memory.cgroup_bytes(root),
        memory_available_bytes=memory.available_bytes(root),
        huge_pages=memory.huge_pages(root),
        folder=str(Path.cwd()),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        nvidia_gpus=gpu.nvidia_gpus(root),
    )
