"""The figures that must be shown, what each must reach, and how measured rounds are judged and printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure of the table."""

    title: str
    must: float
    aim: float
    unit: str = "x"
    """x: a ratio. %: a part of something."""
    lower_is_better: bool = False

    def reaches(self, value: float, goal: float) -> bool:
        """Return whether the value is as good as the goal."""
        return value <= goal if self.lower_is_better else value >= goal


FIGURES = {
    "guides": Figure("steps/s against the guides' command as written (--bf16, padded)", 8, 12),
    "guides_fp32": Figure("steps/s against the same in fp32", 6, 8),
    "best": Figure("steps/s against transformers' best options", 1.9, 2.5),
    "optimize": Figure("whet.optimize in transformers' Trainer, guides' command in fp32", 2.2, 3),
    "limit": Figure("part of the matrix-product limit", 0.78, 0.90, "%"),
    "limit_base": Figure("part of the matrix-product limit, BERT-base size", 0.85, 0.94, "%"),
    "evaluation": Figure("evaluation, rows/s against the guides' command", 2.5, 4),
    "windows": Figure("tokenise + windows, questions/s against the guides' function", 5, 15),
    "memory": Figure("peak memory against the guides' command", 0.5, 0.35, "x", lower_is_better=True),
    "threads": Figure("all threads against one, part of the products' gain", 0.95, 1.0, "%"),
    "adamw": Figure("AdamW step, bytes/s against a copy", 0.80, 0.95, "%"),
}


@dataclass(frozen=True)
class Measured:
    """One line of the table: a figure, measured on one model in one variant."""

    figure: str
    model: str
    variant: str
    """Who against whom, in words."""
    values: Sequence[float]
    """One a round."""
    counts: bool = True
    """Whether this line decides the figure; others are printed for comparison."""

    @property
    def median(self) -> float:
        """The median of the rounds: what is judged."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the figure reaches what it must."""
        return FIGURES[self.figure].reaches(self.median, FIGURES[self.figure].must)

    @property
    def verdict(self) -> str:
        """aim, yes or NO."""
        if FIGURES[self.figure].reaches(self.median, FIGURES[self.figure].aim):
            return "aim"
        return "yes" if self.met else "NO"

    def record(self) -> dict[str, Any]:
        """Return everything for the JSON file."""
        goals = FIGURES[self.figure]
        judged = {"median": self.median, "min": min(self.values), "max": max(self.values), "verdict": self.verdict}
        return asdict(self) | judged | {"title": goals.title, "must": goals.must, "aim": goals.aim, "unit": goals.unit}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Measured:
        """The inverse of `record`; goals are those of today."""
        return cls(**{name: record[name] for name in ("figure", "model", "variant", "values", "counts")})


def shown(value: float, unit: str) -> str:
    """Return the value as the table shows it."""
    return f"{value * 100:.0f} %" if unit == "%" else f"{value:.2f}x"


def table(lines: Sequence[Measured]) -> str:
    """Return the table: figure by figure, in the order of FIGURES."""
    rows = [("figure", "model", "measured", "min to max", "n", "must", "aim", "met?")]
    for key, figure in FIGURES.items():
        of_figure = [line for line in lines if line.figure == key]
        if of_figure:
            rows.append((figure.title, "", "", "", "", "", "", ""))
        for line in of_figure:
            goals = [shown(goal, figure.unit) for goal in (figure.must, figure.aim)]
            spread = f"{shown(min(line.values), figure.unit)} to {shown(max(line.values), figure.unit)}"
            verdict = line.verdict if line.counts else f"({line.verdict})"
            found = (shown(line.median, figure.unit), spread, str(len(line.values)))
            rows.append((f"  {line.variant}", line.model, *found, *goals, verdict))
    widths = [max(len(row[i]) for row in rows if i or row[1]) for i in range(len(rows[0]))]
    padded = [row[0].ljust(widths[0]) + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
              for row in rows]  # fmt: skip
    return "\n".join(line.rstrip() for line in padded)


def summary(lines: Sequence[Measured]) -> str:
    """Return in one sentence how many of the lines that count are met."""
    counted = [line for line in lines if line.counts]
    missed = sorted({FIGURES[line.figure].title for line in counted if not line.met})
    words = f"{sum(line.met for line in counted)} of {len(counted)} lines are met"
    return words + (f"; not yet: {'; '.join(missed)}" if missed else "")
