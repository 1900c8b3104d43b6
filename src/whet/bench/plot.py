"""The table as a picture: the techniques that are faster than the plain run, and those that take less memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.bench.table import Line
from whet.optional import extra, require

_MOST_BARS = 3
"""In each half of the picture; the table shows every technique."""
_CLEARLY = 0.05
"""How far a ratio must be from the plain run's to be shown: smaller differences come from a busy machine."""
_SPEED_COLOUR, _MEMORY_COLOUR, _INK = "#0b6bcb", "#d9580d", "#1f2328"


def draw(found: Sequence[Line], title: str, path: Path) -> None:
    """Write the picture; raises ConfigError if matplotlib is not installed."""
    figures = require("matplotlib.figure", needed_for="the picture of the table", install=extra("report"))
    faster, smaller = fastest(found), smallest(found)
    figure = figures.Figure(figsize=(10, 3.4), layout="constrained", facecolor="white")
    figure.suptitle(finding(faster, smaller), fontsize=13, weight="bold", x=0.01, ha="left", color=_INK)
    figure.supxlabel(f"{title}; plain = 1", fontsize=9, x=0.01, ha="left", color=_INK)
    speed, memory = figure.subplots(1, 2)
    _bars(speed, faster, "steps per second (longer is better)", _SPEED_COLOUR)
    _bars(memory, smaller, "peak memory (shorter is better)", _MEMORY_COLOUR)
    figure.savefig(path, dpi=140)


def fastest(found: Sequence[Line]) -> list[tuple[str, float]]:
    """Return the techniques that are clearly faster than the plain run, with the ratio, fastest first."""
    ratios = [(line.name, line.speed_ratio or 0.0) for line in found if line.equal is not False]
    return sorted([one for one in ratios if one[1] >= 1 + _CLEARLY], key=lambda one: -one[1])[:_MOST_BARS]


def smallest(found: Sequence[Line]) -> list[tuple[str, float]]:
    """Return the techniques that take clearly less memory than the plain run, with the ratio, smallest first."""
    ratios = [(line.name, line.peak_ratio or 1.0) for line in found if line.equal is not False]
    return sorted([one for one in ratios if one[1] <= 1 - _CLEARLY], key=lambda one: one[1])[:_MOST_BARS]


def finding(faster: Sequence[tuple[str, float]], smaller: Sequence[tuple[str, float]]) -> str:
    """Return what the picture shows, in one sentence."""
    parts = [f"{name} trains {ratio:.2f} times as fast as the plain run" for name, ratio in faster[:1]]
    parts += [f"{name} takes {ratio:.2f} of its memory" for name, ratio in smaller[:1]]
    return ",\n".join(parts) or "No technique is clearly faster or smaller than the plain run"


def _bars(axes: Any, shown: Sequence[tuple[str, float]], title: str, colour: str) -> None:
    names, values = [name for name, _ in shown], [ratio for _, ratio in shown]
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.barh(range(len(shown)), values, color=colour, height=0.6)
    axes.axvline(1.0, color=_INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), names, fontsize=10)
    axes.set_ylim(_MOST_BARS - 0.4, -0.6)
    for at, ratio in enumerate(values):
        axes.annotate(
            f"{ratio:.2f}",
            (0, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color="white",
            weight="bold",
        )
    axes.set_xlim(0, 1.05 * max([1.0, *values]))
    axes.tick_params(length=0, colors=_INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
