"""Draws results.json: each line of the table with its rounds, and what it must and may reach. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from figures import FIGURES, Measured
from matplotlib.ticker import PercentFormatter

COLOURS = {"aim": "#1b7837", "yes": "#7fbf7b", "NO": "#b2182b"}
MOST_SHOWN_PART = 1.5
"""Parts beyond it come from a busy machine or a toy model; they would squeeze the others."""
PANELS = (
    ("times faster (more is better)", lambda key: FIGURES[key].unit == "x" and not FIGURES[key].lower_is_better),
    ("part of what the machine can do (more is better)", lambda key: FIGURES[key].unit == "%"),
    ("part of the peer's memory (less is better)", lambda key: FIGURES[key].lower_is_better),
)


def panel(axes: Any, lines: list[Measured], title: str) -> None:
    """Draw one line of the table below the other."""
    for y, line in enumerate(lines):
        goals = FIGURES[line.figure]
        axes.barh(y, line.median, color=COLOURS[line.verdict], alpha=1.0 if line.counts else 0.35, height=0.7)
        axes.plot([min(line.values), max(line.values)], [y, y], color="black", linewidth=1.2)
        axes.plot([goals.must] * 2, [y - 0.45, y + 0.45], color="black", linewidth=2)
        axes.plot([goals.aim] * 2, [y - 0.45, y + 0.45], color="black", linewidth=1, linestyle=":")
        text = f"{line.median:.0%}" if goals.unit == "%" else f"{line.median:.2f}"
        right = max(line.median, goals.aim, max(line.values))
        right = min(right, MOST_SHOWN_PART) if goals.unit == "%" else right
        axes.annotate(text, (right, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(lines)), [label(line) for line in lines], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlim(left=0)
    if FIGURES[lines[0].figure].unit == "%":
        axes.set_xlim(right=min(axes.get_xlim()[1], MOST_SHOWN_PART))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def label(line: Measured) -> str:
    """Return what a bar is."""
    return f"{line.figure.replace('_', ' ')}: {line.variant} ({line.model})"


def main() -> None:
    """Draw the file of the first argument into that of the second."""
    results = json.loads(Path(sys.argv[1]).read_text())
    measured = [Measured.of(record) for part in results.values() for record in part["lines"]]
    order = list(FIGURES)
    measured.sort(key=lambda line: order.index(line.figure))
    panels = [(title, [line for line in measured if belongs(line.figure)]) for title, belongs in PANELS]
    panels = [(title, lines) for title, lines in panels if lines]
    heights = [len(lines) + 1.5 for _, lines in panels]
    figure, all_axes = plt.subplots(
        len(panels),
        figsize=(12, 0.32 * sum(heights) + 1.2),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (title, lines), axes in zip(panels, all_axes[:, 0], strict=True):
        panel(axes, lines, title)
    machine = next(iter(results.values()))["machine"]
    figure.suptitle(
        f"whet on {machine['processor']}, {machine['cores']} cores, torch {machine['versions']['torch']}, "
        f"commit {machine['commit']}\nbar: median of the rounds; line: least to most; thick mark: must; dotted: aim; "
        "pale: does not count",
        fontsize=9,
    )
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
