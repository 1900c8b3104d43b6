"""From logits to labels, and how these are judged: metrics, files of predictions, and the confusion matrix."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whet.data.store import RowStore
from whet.errors import ConfigError, escape_controls
from whet.jobs import metrics
from whet.jobs.fields import Pooling
from whet.jobs.judging import PredictionJudge, pooled
from whet.log import logger
from whet.optional import extra, require
from whet.tasks.classify.labels import Scheme
from whet.tasks.classify.rows import Split
from whet.watch import files as output_files


@dataclass(frozen=True)
class Decision:
    """How logits become labels."""

    scheme: Scheme
    threshold: float = 0.5
    """With several labels a row: the probability from which a label is predicted."""
    pooling: Pooling = "mean"
    """How the logits of a text's windows become one."""

    def found(self, logits: np.ndarray) -> np.ndarray:
        """Return the predicted classes (texts,), the predicted labels (texts, labels) bool, or numbers (texts,)."""
        if self.scheme.kind == "regression":
            return logits[:, 0]
        if self.scheme.kind == "single_label_classification":
            return logits.argmax(axis=1)
        return self.probabilities(logits) >= self.threshold

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probability of each label, (texts, labels) float64."""
        wide = logits.astype(np.float64)
        if self.scheme.kind == "multi_label_classification":
            return 1 / (1 + np.exp(-np.clip(wide, -700, 700)))
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def entries(self, logits: np.ndarray, top_k: int) -> Iterator[dict[str, Any]]:
        """Yield for each text what a line of the predictions says: the label or value, and the best scores."""
        if self.scheme.kind == "regression":
            yield from ({"value": float(value)} for value in logits[:, 0])
            return
        found, scores, names = self.found(logits), self.probabilities(logits), self.scheme.names
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        for row, order in enumerate(best):
            top = {names[n]: round(float(scores[row, n]), 6) for n in order}
            if self.scheme.kind == "single_label_classification":
                chosen = int(found[row])
                yield {"label": names[chosen], "score": round(float(scores[row, chosen]), 6), "scores": top}
            else:
                yield {"labels": [names[n] for n in np.flatnonzero(found[row])], "scores": top}


def logits_of(predictions: Any) -> np.ndarray:
    """Return the logits (rows, labels); some models give more arrays after them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def json_lines(places: Sequence[str], entries: Iterator[dict[str, Any]]) -> str:
    """Return one JSON object a text: its place in the file, and what was predicted."""
    rows = ({"row": place, **entry} for place, entry in zip(places, entries, strict=True))
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


_MOST_COLUMNS = 8
"""Classes of a matrix that fits the width; with more, the most confused pairs are listed."""
_MOST_PAIRS = 10
_NAME, _CELL = 20, 6
_LARGEST_NAMED = 40
"""Classes whose names a picture has room for."""


def confusion_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the lines of the matrix, or for many classes the pairs that are confused most."""
    if len(names) <= _MOST_COLUMNS:
        return _matrix_table(counts, names)
    return _pairs_table(counts, names)


def confusion_csv(counts: np.ndarray, names: Sequence[str]) -> str:
    """Return the matrix as CSV: a row for each expected label, a column for each predicted one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["expected", *names])
    writer.writerows([name, *row.tolist()] for name, row in zip(names, counts, strict=True))
    return out.getvalue()


def draw_confusion(counts: np.ndarray, names: Sequence[str], path: Path) -> bool:
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


def _matrix_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the matrix; columns have numbers, as names do not fit above them."""
    head = " " * (_NAME + 6) + "".join(f"{n:>{_CELL}}" for n in range(1, len(names) + 1))
    rows = [
        f"  {n:>2}  {_fit(name, _NAME)}{''.join(f'{count:>{_CELL}}' for count in row)}"
        for n, (name, row) in enumerate(zip(names, counts.tolist(), strict=True), start=1)
    ]
    return ["confusion matrix (rows: expected label, columns: predicted label)", head, *rows]


def _pairs_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    n_wrong = int(wrong.sum())
    wrong[counts.sum(axis=1) == 1] = 0  # "1 of 1" says nothing of a label
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_PAIRS]
    pairs = [(int(n) // len(names), int(n) % len(names)) for n in order]
    lines = [
        f"  {_fit(names[a], 30)}  {_fit(names[b], 30)}{wrong[a, b]:>5} of {counts[a].sum():<5}".rstrip()
        for a, b in pairs
        if wrong[a, b]
    ]
    if not lines:
        alone = f"{n_wrong} texts are given the label of another, and each is the only one of its own label"
        return [alone if n_wrong else "no label is confused with another"]
    return ["most confused labels", f"  {'expected':<30}  {'predicted':<30}", *lines]


def _fit(name: str, width: int) -> str:
    """Return the name on one line, cut or filled up to this width."""
    shown = escape_controls(name)
    return (shown if len(shown) <= width else shown[: width - 1] + "…").ljust(width)


_TOP = 3


@dataclass
class ClassifyJudge(PredictionJudge):
    """Judges a model on one split; windows of a text count once."""

    split: Split
    decision: Decision
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    tables: list[str] = field(default_factory=list)
    """Lines about the last files written, for the end of the run."""

    @property
    def dataset(self) -> RowStore:
        """The rows of the split, with their labels."""
        return self.split.dataset

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""
        expected = self.split.labels
        if expected is None:
            return {}
        found = self.decision.found(self._pooled(prediction.predictions))
        kind = self.decision.scheme.kind
        if kind == "regression":
            return metrics.regression(expected, found)
        if kind == "multi_label_classification":
            return metrics.multi_label(expected.astype(bool), found)
        return metrics.single_label(expected, found, len(self.decision.scheme.names))

    def write(self, predictions: Any, prefix: str) -> None:
        """Write the predictions as JSON lines; a test split also as run_classification.py does."""
        logits = self._pooled(predictions)
        entries = list(self.decision.entries(logits, _TOP))
        self.store(f"{prefix}_predictions.jsonl", json_lines(self.split.examples.places, iter(entries)))
        if prefix == "predict":
            lines = (f"{n}\t{_shown(entry)}\n" for n, entry in enumerate(entries))
            self.store("predict_results.txt", "index\tprediction\n" + "".join(lines))
        if self.split.labels is not None and self.decision.scheme.kind == "single_label_classification":
            self._confusion(self.decision.found(logits), prefix)

    def _pooled(self, predictions: Any) -> np.ndarray:
        return pooled(logits_of(predictions), self.split.rows.text_of, self.decision.pooling)

    def _confusion(self, found: np.ndarray, prefix: str) -> None:
        assert self.split.labels is not None
        names = self.decision.scheme.names
        counts = metrics.confusion(self.split.labels, found, len(names))
        self.tables += confusion_table(counts, names)
        self.store(f"{prefix}_confusion.csv", confusion_csv(counts, names))
        picture = f"{prefix}_confusion.png"
        with output_files.stored(f"{picture} cannot be written", self.folder, on_error=self.on_error):
            if not draw_confusion(counts, names, self.folder / picture):
                logger.info("no picture of the confusion matrix: pip install %s", extra("report"))


def _shown(entry: dict[str, Any]) -> str:
    if "value" in entry:
        return f"{entry['value']:3.3f}"
    return str(entry["label"] if "label" in entry else entry["labels"])
