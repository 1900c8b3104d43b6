"""How a task judges its model on one split of the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whet.engine.engine import Engine
from whet.jobs.fields import Pooling
from whet.watch import files as output_files


class Judge(Protocol):
    """Computes the metrics of one split, and writes the files of its predictions."""

    def while_training(self) -> dict[str, Any]:
        """Return the fields of a RunSpec by which this judge computes the metrics of evaluations in a training."""
        ...

    def judge(self, engine: Engine, prefix: str) -> dict[str, float]:
        """Evaluate the model, write its predictions, and return the metrics; all names begin with the prefix."""
        ...


class PredictionJudge(ABC):
    """A judge that sees the predictions for all rows of its split at once."""

    folder: Path
    """Where its files are written."""
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""

    @property
    @abstractmethod
    def dataset(self) -> Any:
        """The rows of the split, with their labels."""

    @abstractmethod
    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""

    @abstractmethod
    def write(self, predictions: Any, prefix: str) -> None:
        """Write the predictions, in files whose names begin with the prefix."""

    def while_training(self) -> dict[str, Any]:
        """Return the fields of a RunSpec by which this judge computes the metrics of evaluations in a training."""
        return {"compute_metrics": self.metrics}

    def judge(self, engine: Engine, prefix: str) -> dict[str, float]:
        """Return the metrics of the engine's model, and write its predictions."""
        found = engine.predict(self.dataset, prefix, self.metrics)
        self.write(found.predictions, prefix)
        metrics = dict(found.metrics or {})
        engine.log(dict(metrics))
        return metrics

    def store(self, name: str, text: str) -> None:
        """Write this text into a file of the folder."""
        with output_files.stored(f"{name} cannot be written", self.folder, on_error=self.on_error):
            output_files.write_text(self.folder / name, text)


def pooled(logits: np.ndarray, group_of: np.ndarray, pooling: Pooling = "mean") -> np.ndarray:
    """Return the logits of each group, (groups, labels); `group_of` (rows,) does not decrease and leaves none out."""
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    if len(starts) == len(group_of):
        return logits
    if pooling == "max":
        return np.maximum.reduceat(logits, starts)
    counts = np.diff(np.append(starts, len(group_of)))
    return np.add.reduceat(logits.astype(np.float64), starts) / counts[:, None]
