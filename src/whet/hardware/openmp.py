"""The OpenMP libraries that this process has loaded. Each has its own threads, so there should be one."""

from __future__ import annotations

import re
from pathlib import Path

from whet.hardware.cgroup import ROOT, read_lines

LIMIT_THREADS = ("MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "OMP_THREAD_LIMIT")
"""Variables that decide over torch's threads before OMP_NUM_THREADS does."""
_NAME = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.so")


def libraries(root: Path = ROOT) -> list[str]:
    """Return the paths of the OpenMP libraries in this process's memory; the same file under two names counts once."""
    found: dict[tuple[str, str], str] = {}
    for line in read_lines(root / "proc/self/maps"):
        _, _, _, device, file, *path = line.split(maxsplit=5)
        if path and _NAME.search(path[0].rpartition("/")[2]):
            found.setdefault((device, file), path[0])
    return sorted(found.values())
