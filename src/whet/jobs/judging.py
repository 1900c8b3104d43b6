"""How a task judges its model on one split of the data."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from whet.jobs.fields import Pooling
from whet.train.trainer import Trainer


class Judge(Protocol):
    """Computes the metrics of one split, and writes the files of its predictions."""

    def follow(self, trainer: Trainer) -> None:
        """Let this judge compute the metrics of the trainer's next evaluations."""
        ...

    def judge(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """Evaluate the model, write its predictions, and return the metrics; all names begin with the prefix."""
        ...


class PredictionJudge(Protocol):
    """A judge that sees the predictions for all rows of its split at once."""

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""
        ...

    def write(self, predictions: Any, prefix: str) -> None:
        """Write the predictions, in files whose names begin with the prefix."""
        ...


def judge_predictions(trainer: Trainer, judge: PredictionJudge, rows: Any, prefix: str) -> dict[str, float]:
    """Predict the rows, write the predictions and return the metrics."""
    trainer.compute_metrics = judge.metrics
    found = trainer.predict(rows, metric_key_prefix=prefix)
    judge.write(found.predictions, prefix)
    metrics = dict(found.metrics or {})
    trainer.log(dict(metrics))
    return metrics


def pooled(logits: np.ndarray, group_of: np.ndarray, pooling: Pooling = "mean") -> np.ndarray:
    """Return the logits of each group, (groups, labels); `group_of` (rows,) does not decrease and leaves none out."""
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    if len(starts) == len(group_of):
        return logits
    if pooling == "max":
        return np.maximum.reduceat(logits, starts)
    counts = np.diff(np.append(starts, len(group_of)))
    return np.add.reduceat(logits.astype(np.float64), starts) / counts[:, None]
