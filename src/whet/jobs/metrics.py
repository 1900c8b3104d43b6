"""Metrics of classification and regression, as scikit-learn and scipy define them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np


def confusion(expected: np.ndarray, found: np.ndarray, n_labels: int) -> np.ndarray:
    """Return how often each pair occurs, (expected class, found class) int64."""
    return np.bincount(expected * n_labels + found, minlength=n_labels * n_labels).reshape(n_labels, n_labels)


def confusion_csv(counts: np.ndarray, names: Sequence[str]) -> str:
    """Return the matrix as CSV: a row for each expected label, a column for each predicted one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["expected", *names])
    writer.writerows([name, *row.tolist()] for name, row in zip(names, counts, strict=True))
    return out.getvalue()


def single_label(expected: np.ndarray, found: np.ndarray, n_labels: int) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews' correlation of classes (rows,)."""
    counts = confusion(expected, found, n_labels)
    return {
        "accuracy": float((expected == found).mean()),
        "f1_macro": macro_f1(counts),
        "matthews_correlation": matthews(counts),
    }


def macro_f1(counts: np.ndarray) -> float:
    """Return the mean F1 of the classes that occur in the data or in the predictions, as scikit-learn does."""
    hits, expected, found = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    present = expected + found > 0
    return float((2 * hits[present] / (expected + found)[present]).mean())


def matthews(counts: np.ndarray) -> float:
    """Return Matthews' correlation coefficient for any number of classes (Gorodkin 2004); 0 where it is undefined."""
    counts = counts.astype(np.float64)
    total, hits = counts.sum(), np.trace(counts)
    expected, found = counts.sum(axis=1), counts.sum(axis=0)
    spread = np.sqrt((total**2 - found @ found) * (total**2 - expected @ expected))
    return float((hits * total - expected @ found) / spread) if spread else 0.0


def multi_label(expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Return micro and macro F1 and the share of rows with exactly the right labels; arrays (rows, labels) of bool."""
    hits = (expected & found).sum(axis=0)
    sizes = expected.sum(axis=0) + found.sum(axis=0)
    each = np.divide(2 * hits, sizes, out=np.zeros(len(hits)), where=sizes > 0)  # scikit-learn's zero_division=0
    return {
        "f1_micro": float(2 * hits.sum() / sizes.sum()) if sizes.sum() else 0.0,
        "f1_macro": float(each.mean()),
        "accuracy": float((expected == found).all(axis=1).mean()),
    }


def regression(expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Return the correlations by Pearson and by Spearman, and the mean squared error, of numbers (rows,)."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    return {
        "pearson": pearson(expected, found),
        "spearmanr": pearson(ranks(expected), ranks(found)),
        "mse": float(((expected - found) ** 2).mean()),
    }


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation coefficient; 0 where one side does not vary, as it is undefined there."""
    x, y = x - x.mean(), y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value from 1 on; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[index]
