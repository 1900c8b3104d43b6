"""What a benchmark's numbers were measured on: stored with every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


def facts() -> dict[str, object]:
    """Return processor, cores, memory, versions and commit."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "whet-train")},
        "commit": commit.stdout.strip(),
    }


def has_bf16_products() -> bool:
    """Return whether torch has bf16 products for this processor. Elsewhere plain loops take minutes for one step."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
