"""How a task judges its model on one split of the data."""

from __future__ import annotations

from typing import Any, Protocol

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
