"""Another checkout of whet, which a benchmark compares this one with. Needs nothing but Python."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WHETS = ("whet_fp32", "whet_auto")
OTHERS = ("other_fp32", "other_auto")
"""The same sides, by the other checkout."""


def script_of(checkout: Path, script: Path) -> list[str]:
    """Return the Python of a checkout and its copy of a script of this one."""
    return [str(checkout / ".venv" / "bin" / "python"), str(checkout / script.relative_to(HERE))]


def against_other(seconds: Mapping[str, Sequence[float]], peak_bytes: Mapping[str, int]) -> str:
    """Return the seconds, step by step, and the memory of each side over those of the other checkout's."""
    shown = []
    for side, other in zip(WHETS, OTHERS, strict=True):
        ratios = [a / b for a, b in zip(seconds[side], seconds[other], strict=True)]
        memory = peak_bytes[side] / peak_bytes[other]
        shown.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}), memory {memory:.3f}")
    return "   ".join(shown)
