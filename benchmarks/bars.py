"""Draws groups of bars with a headline, once for light and once for dark pages. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

_WIDTH = 0.38


@dataclass(frozen=True)
class Theme:
    """The colours of one kind of page."""

    name: str
    paper: str
    ink: str
    bars: tuple[str, str]
    """One for each series."""


THEMES = (
    Theme("light", "#ffffff", "#1f2328", ("#0b6bcb", "#d9580d")),
    Theme("dark", "#0d1117", "#f0f6fc", ("#4ea1ff", "#ff9248")),
)


@dataclass(frozen=True)
class Chart:
    """What the picture shows: the median of each group and series, with the range of its values."""

    headline: str
    note: str
    groups: Sequence[str]
    series: Mapping[str, Mapping[str, Sequence[float]]]
    """The measured values by series and group; a series without a value for a group has no bar there."""
    unit: str = ""
    mark: float | None = None
    """Where a dotted line is drawn: the value of what the bars are compared with."""


def draw(chart: Chart, folder: Path, stem: str) -> list[Path]:
    """Write the chart as STEM-light.png and STEM-dark.png into the folder; return the files."""
    paths = [folder / f"{stem}-{theme.name}.png" for theme in THEMES]
    for theme, path in zip(THEMES, paths, strict=True):
        with plt.rc_context({"text.color": theme.ink, "font.size": 11}):
            height = 1.9 + 0.95 * len(chart.groups)
            figure, axes = plt.subplots(figsize=(9, height), layout="constrained", facecolor=theme.paper)
            for number, (name, values) in enumerate(chart.series.items()):
                _bars(axes, chart, theme, number, name, values)
            _dress(axes, chart, theme)
            figure.suptitle(chart.headline, x=0.01, ha="left", weight="bold", fontsize=14)
            figure.supxlabel(chart.note, x=0.01, ha="left", fontsize=9)
            figure.savefig(path, dpi=130)
            plt.close(figure)
    return paths


def _bars(axes: Any, chart: Chart, theme: Theme, number: int, name: str, values: Mapping[str, Sequence[float]]) -> None:
    shown = [(at, values[group]) for at, group in enumerate(chart.groups) if group in values]
    places = [at + _WIDTH * (number - (len(chart.series) - 1) / 2) for at, _ in shown]
    medians = [median(found) for _, found in shown]
    axes.barh(places, medians, height=0.9 * _WIDTH, color=theme.bars[number], label=name)
    for place, middle, (_, found) in zip(places, medians, shown, strict=True):
        if len(found) > 1:
            axes.plot([min(found), max(found)], [place, place], color=theme.ink, linewidth=1)
        axes.annotate(
            f"{middle:.1f}{chart.unit}", (0, place), xytext=(6, 0), textcoords="offset points",
            va="center", weight="bold", color=theme.paper,
        )  # fmt: skip


def _dress(axes: Any, chart: Chart, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    if chart.mark is not None:
        axes.axvline(chart.mark, color=theme.ink, linewidth=1, linestyle=":", zorder=0)
    axes.set_yticks(range(len(chart.groups)), chart.groups)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(f"{{x:.0f}}{chart.unit}")
    axes.tick_params(colors=theme.ink, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
