"""From logits to labels: probabilities, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.jobs.fields import Pooling
from whet.tasks.classify.labels import Scheme


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
