"""Draws the speed of whet from results.json, for light and for dark pages. Needs matplotlib.

    python benchmarks/cpu/plot.py benchmarks/cpu/results.json benchmarks/cpu
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from figures import Measured

GROUPS = {
    "guides": "compared with the usual\nrun_qa.py command (bf16,\nrows padded to 384 tokens)",
    "best": "compared with transformers'\nfastest options (bf16, rows\nof similar length together)",
    "optimize": "whet.optimize in transformers'\nTrainer, compared with the\nsame Trainer without it (fp32)",
}
"""The figures that the picture shows, and the words next to their bars."""
MODELS = ("MiniLM", "BERT-base size")


@dataclass(frozen=True)
class Theme:
    """The colours of one kind of page."""

    name: str
    paper: str
    ink: str
    bars: tuple[str, str]
    """One for each model."""


THEMES = (
    Theme("light", "#ffffff", "#1f2328", ("#0b6bcb", "#d9580d")),
    Theme("dark", "#0d1117", "#f0f6fc", ("#4ea1ff", "#ff9248")),
)


def headline(lines: Sequence[Measured]) -> str:
    """Return the finding in one sentence, from the measured lines."""
    words = {key: _span([line.median for line in lines if line.figure == key]) for key in GROUPS}
    first = f"whet trains {words['guides']} times as fast as the usual run_qa.py command" if words["guides"] else ""
    second = f"{words['best']} times as fast as transformers' fastest options" if words["best"] else ""
    return ",\n".join(part for part in (first, second) if part) or "Training steps per second with whet"


def _span(values: Sequence[float]) -> str:
    shown = sorted({f"{value:.1f}" if value < 5 else f"{value:.0f}" for value in values}, key=float)
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else ""


def draw(lines: Sequence[Measured], note: str, theme: Theme, path: Path) -> None:
    """Draw the bars of the lines that count."""
    keys = [key for key in GROUPS if any(line.figure == key for line in lines)]
    with plt.rc_context({"text.color": theme.ink, "axes.labelcolor": theme.ink, "font.size": 11}):
        figure, axes = plt.subplots(figsize=(9, 1.9 + 0.95 * len(keys)), layout="constrained", facecolor=theme.paper)
        axes.set_facecolor(theme.paper)
        for number, (model, colour) in enumerate(zip(MODELS, theme.bars, strict=True)):
            of_model = [line for line in lines if line.model == model]
            places = [keys.index(line.figure) + 0.38 * (number - 0.5) for line in of_model]
            axes.barh(places, [line.median for line in of_model], height=0.34, color=colour, label=model)
            for place, line in zip(places, of_model, strict=True):
                axes.plot([min(line.values), max(line.values)], [place, place], color=theme.ink, linewidth=1)
                axes.annotate(
                    f"{line.median:.1f}x", (0, place), xytext=(6, 0), textcoords="offset points",
                    va="center", weight="bold", color=theme.paper,
                )  # fmt: skip
        _dress(axes, [GROUPS[key] for key in keys], theme)
        figure.suptitle(headline(lines), x=0.01, ha="left", weight="bold", fontsize=14)
        figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _dress(axes: Any, names: Sequence[str], theme: Theme) -> None:
    axes.axvline(1.0, color=theme.ink, linewidth=1, linestyle=":", zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:.0f}x")
    axes.tick_params(colors=theme.ink, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", frameon=False)


def chosen(results: dict[str, Any]) -> list[Measured]:
    """Return the lines that the picture shows: for each figure and model, the last one that counts.

    Where two precisions count, the last one is the one that whet chooses by itself."""
    lines = [Measured.of(record) for record in results.get("steps", {}).get("lines", [])]
    shown = [line for line in lines if line.counts and line.figure in GROUPS and line.model in MODELS]
    return list({(line.figure, line.model): line for line in shown}.values())


def main() -> None:
    """Draw the file of the first argument into the folder of the second, once for each kind of page."""
    file, folder = map(Path, sys.argv[1:])
    results = json.loads(file.read_text("utf-8"))
    lines = chosen(results)
    if not lines:
        print("no picture: the part `steps` has not measured MiniLM or BERT-base size")
        return
    machine = results["steps"]["machine"]
    note = (
        f"Training steps per second as a ratio. {machine['cores']} cores of {machine['processor']}, "
        f"torch {machine['versions']['torch'].partition('+')[0]}. Bar: median of the rounds; line: smallest to largest."
    )
    for theme in THEMES:
        path = folder / f"speed-{theme.name}.png"
        draw(lines, note, theme, path)
        print(path)


if __name__ == "__main__":
    main()
