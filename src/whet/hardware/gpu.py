"""The GPUs in the machine, usable or not."""

from __future__ import annotations

from pathlib import Path

from whet.hardware.cgroup import ROOT, read_lines


def nvidia_gpus(root: Path = ROOT) -> list[str]:
    """Return the names of the NVIDIA GPUs that the kernel's driver knows."""
    found = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in found for line in read_lines(path) if line.startswith("Model:")]
    return [line.partition(":")[2].strip() for line in lines]
