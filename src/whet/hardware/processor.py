"""Who made the processor: some libraries choose their code by it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def vendor() -> str:
    """Return the processor's vendor as it names itself ("GenuineIntel", "AuthenticAMD"), "" where nothing says it."""
    try:
        lines = _CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
