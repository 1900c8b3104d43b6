"""The table as a picture: speed and peak memory of each technique beside the plain run's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whet.bench.table import Line
from whet.optional import require

_BETTER, _WORSE, _EVEN = "#2a7f62", "#b5532a", "#7a7a7a"
_EVEN_WITHIN = 0.02


def draw(found: Sequence[Line], title: str, path: Path) -> None:
    """Write the picture; raises ConfigError where matplotlib is not installed."""
    figures = require("matplotlib.figure", needed_for="the picture of the table", install="'whet[report]'")
    shown = [line for line in found if line.speed_ratio is not None][::-1]
    figure = figures.Figure(figsize=(11, 1.6 + 0.34 * len(shown)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    speed, memory = figure.subplots(1, 2, sharey=True)
    _bars(speed, shown, [line.speed_ratio for line in shown], more_is_better=True)
    _bars(memory, shown, [line.peak_ratio for line in shown], more_is_better=False)
    speed.set_xlabel("steps a second, plain = 1 (more is better)")
    memory.set_xlabel("peak memory above the start, plain = 1 (less is better)")
    figure.savefig(path, dpi=140)


def _bars(axes, shown: Sequence[Line], ratios: Sequence[float | None], *, more_is_better: bool) -> None:
    values = [ratio or 0.0 for ratio in ratios]
    axes.barh(range(len(shown)), values, color=[_color(value, more_is_better) for value in values], height=0.7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [_name(line) for line in shown], fontsize=9)
    for place, ratio in enumerate(ratios):
        axes.annotate(
            "?" if ratio is None else f"{ratio:.2f}", (ratio or 0.0, place), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlim(0, 1.12 * max([1.0, *values]))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _name(line: Line) -> str:
    return line.name if line.equal is not False else f"{line.name} (loss differs!)"


def _color(ratio: float, more_is_better: bool) -> str:
    if abs(ratio - 1.0) <= _EVEN_WITHIN:
        return _EVEN
    return _BETTER if (ratio > 1.0) == more_is_better else _WORSE
