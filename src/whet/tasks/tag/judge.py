"""Metrics and files of one split of tagged sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.tasks.tag import metrics
from whet.tasks.tag.labels import Tags
from whet.tasks.tag.rows import Split
from whet.tasks.tag.sentences import Sentences
from whet.train.output import files as output_files


def best_tags(logits: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tag of each token and its probability, both (rows, T): all that is kept of the logits."""
    del labels
    scores = (logits[0] if isinstance(logits, tuple) else logits).float().softmax(-1)
    best = scores.max(-1)
    return best.indices, best.values


@dataclass(frozen=True)
class TagJudge:
    """Judges a model on one split, by the first piece of each word."""

    split: Split
    tags: Tags
    folder: Path
    each_entity: bool = False

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction, whose predictions are those of `best_tags`."""
        if self.split.numbers is None:
            return {}
        words, found, _ = self._of_words(prediction.predictions)
        expected = [numbers[index] for numbers, index in zip(self.split.numbers, words, strict=True)]
        return metrics.judge(expected, found, self.tags, each_entity=self.each_entity)

    def write(self, predictions: Any, prefix: str) -> None:
        """Write words, tags and scores as JSON lines; a test split also as run_ner.py does: tags alone, a line each."""
        entries = list(self.entries(predictions))
        self._store(
            f"{prefix}_predictions.jsonl", "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in entries)
        )
        if prefix == "predict":
            lines = (" ".join(tag for tag in one["tags"] if tag is not None) for one in entries)
            self._store("predictions.txt", "".join(f"{line}\n" for line in lines))

    def entries(self, predictions: Any) -> Iterator[dict[str, Any]]:
        """Yield for each sentence its words with their tags and scores; None for a word that was not read."""
        yield from entries_of(self.split.sentences, self.tags, *self._of_words(predictions))

    def _of_words(self, predictions: Any) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        return of_words(self.split, *predictions)

    def _store(self, name: str, text: str) -> None:
        with output_files.stored(f"{name} cannot be written", self.folder):
            output_files.write_text(self.folder / name, text)


def of_words(
    split: Split, best: np.ndarray, scores: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return for each sentence the words that were read, their tags as numbers and their scores."""
    places = [split.rows.first_pieces(row) for row in range(len(split.sentences))]
    words = [index for index, _ in places]
    found = [best[row][place].astype(np.int64) for row, (_, place) in enumerate(places)]
    return words, found, [scores[row][place] for row, (_, place) in enumerate(places)]


def entries_of(
    sentences: Sentences, tags: Tags, words: list[np.ndarray], found: list[np.ndarray], scores: list[np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Yield what is written of each sentence."""
    for row, place in enumerate(sentences.places):
        given = list(sentences.words[row])
        chosen: list[str | None] = [None] * len(given)
        shares: list[float | None] = [None] * len(given)
        for word, tag, score in zip(words[row], found[row], scores[row], strict=True):
            chosen[word], shares[word] = tags.names[tag], round(float(score), 6)
        yield {"row": place, "tokens": given, "tags": chosen, "scores": shares}
