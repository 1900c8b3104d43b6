"""Metrics and files of one split: predictions, and for one label a text the confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whet.jobs import metrics
from whet.jobs.judging import judge_predictions
from whet.jobs.pooling import pooled
from whet.log import logger
from whet.optional import extra
from whet.tasks.classify import confusion
from whet.tasks.classify.prediction import Decision, json_lines, logits_of
from whet.tasks.classify.rows import Split
from whet.train.output import files as output_files
from whet.train.trainer import Trainer

_TOP = 3


@dataclass
class ClassifyJudge:
    """Judges a model on one split; windows of a text count once."""

    split: Split
    decision: Decision
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    tables: list[str] = field(default_factory=list)
    """Lines about the last files written, for the end of the run."""

    def follow(self, trainer: Trainer) -> None:
        """Let this judge compute the metrics of the trainer's next evaluations."""
        trainer.compute_metrics = self.metrics

    def judge(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """Return the metrics of the trainer's model, and write its predictions."""
        return judge_predictions(trainer, self, self.split.dataset, prefix)

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
        self._store(f"{prefix}_predictions.jsonl", json_lines(self.split.examples.places, iter(entries)))
        if prefix == "predict":
            lines = (f"{n}\t{_shown(entry)}\n" for n, entry in enumerate(entries))
            self._store("predict_results.txt", "index\tprediction\n" + "".join(lines))
        if self.split.labels is not None and self.decision.scheme.kind == "single_label_classification":
            self._confusion(self.decision.found(logits), prefix)

    def _pooled(self, predictions: Any) -> np.ndarray:
        return pooled(logits_of(predictions), self.split.rows.text_of, self.decision.pooling)

    def _confusion(self, found: np.ndarray, prefix: str) -> None:
        assert self.split.labels is not None
        names = self.decision.scheme.names
        counts = metrics.confusion(self.split.labels, found, len(names))
        self.tables += confusion.table(counts, names)
        self._store(f"{prefix}_confusion.csv", confusion.as_csv(counts, names))
        picture = f"{prefix}_confusion.png"
        with output_files.stored(f"{picture} cannot be written", self.folder, on_error=self.on_error):
            if not confusion.draw(counts, names, self.folder / picture):
                logger.info("no picture of the confusion matrix: pip install %s", extra("report"))

    def _store(self, name: str, text: str) -> None:
        with output_files.stored(f"{name} cannot be written", self.folder, on_error=self.on_error):
            output_files.write_text(self.folder / name, text)


def _shown(entry: dict[str, Any]) -> str:
    if "value" in entry:
        return f"{entry['value']:3.3f}"
    return str(entry["label"] if "label" in entry else entry["labels"])
