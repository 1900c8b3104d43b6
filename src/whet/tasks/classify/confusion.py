"""The confusion matrix: a table of 80 columns for the terminal, a CSV file, and a picture."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from whet.errors import ConfigError, escape_controls
from whet.optional import extra, require

WIDTH = 80
_MOST_COLUMNS = 8
"""Classes of a matrix that fits the width; with more, the most confused pairs are listed."""
_MOST_PAIRS = 10
_NAME, _CELL = 20, 6
_LARGEST_NAMED = 40
"""Classes whose names a picture has room for."""


def table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the lines of the matrix, or for many classes the pairs that are confused most."""
    if len(names) <= _MOST_COLUMNS:
        return _matrix(counts, names)
    return _pairs(counts, names)


def as_csv(counts: np.ndarray, names: Sequence[str]) -> str:
    """Return the matrix as CSV: a row for each expected label, a column for each predicted one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["expected", *names])
    writer.writerows([name, *row.tolist()] for name, row in zip(names, counts, strict=True))
    return out.getvalue()


def draw(counts: np.ndarray, names: Sequence[str], path: Path) -> bool:
    """Write the matrix as a picture, rows in shares; return False if matplotlib is not installed."""
    try:
        figures = require("matplotlib.figure", needed_for="the picture of the table", install=extra("report"))
    except ConfigError:
        return False
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = min(max(4.0, 0.3 * len(names) + 2), 20.0)
    figure = figures.Figure(figsize=(size, size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    axes.set(xlabel="predicted", ylabel="expected", title="share of the expected label's examples")
    if len(names) <= _LARGEST_NAMED:
        shown = [_fit(name, 30).strip().replace("$", r"\$") for name in names]
        axes.set_xticks(range(len(names)), shown, rotation=90)
        axes.set_yticks(range(len(names)), shown)
    figure.colorbar(image, shrink=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have becomes a box
        figure.savefig(path, dpi=100)
    return True


def _matrix(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the matrix; columns have numbers, as names do not fit above them."""
    head = " " * (_NAME + 6) + "".join(f"{n:>{_CELL}}" for n in range(1, len(names) + 1))
    rows = [
        f"  {n:>2}  {_fit(name, _NAME)}{''.join(f'{count:>{_CELL}}' for count in row)}"
        for n, (name, row) in enumerate(zip(names, counts.tolist(), strict=True), start=1)
    ]
    return ["confusion matrix (rows: expected label, columns: predicted label)", head, *rows]


def _pairs(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_PAIRS]
    pairs = [(int(n) // len(names), int(n) % len(names)) for n in order]
    lines = [
        f"  {_fit(names[a], 30)}  {_fit(names[b], 30)}{wrong[a, b]:>5} of {counts[a].sum():<5}".rstrip()
        for a, b in pairs
        if wrong[a, b]
    ]
    if not lines:
        return ["no label is confused with another"]
    return ["most confused labels", f"  {'expected':<30}  {'predicted':<30}", *lines]


def _fit(name: str, width: int) -> str:
    """Return the name on one line, cut or filled up to this width."""
    shown = escape_controls(name)
    return (shown if len(shown) <= width else shown[: width - 1] + "…").ljust(width)
