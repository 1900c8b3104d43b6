"""Metrics and files of one split of tagged sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.jobs.fields import Pooling
from whet.jobs.judging import judge_predictions
from whet.tasks.tag import metrics
from whet.tasks.tag.labels import Tags
from whet.tasks.tag.rows import Split
from whet.tasks.tag.sentences import Sentences
from whet.tasks.tag.word_tags import Found, words_of
from whet.train.output import files as output_files
from whet.train.trainer import Trainer


@dataclass(frozen=True)
class TagJudge:
    """Judges a model on one split, by the first piece of each word."""

    split: Split
    tags: Tags
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    each_entity: bool = False
    pooling: Pooling = "mean"
    """How the logits of a word in several windows become one."""

    def follow(self, trainer: Trainer) -> None:
        """Let this judge compute the metrics of the trainer's next evaluations."""
        trainer.compute_metrics = self.metrics

    def judge(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """Return the metrics of the trainer's model, and write its predictions."""
        return judge_predictions(trainer, self, self.split.dataset, prefix)

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction; its predictions are logits, or those of `best_tags`."""
        if self.split.numbers is None:
            return {}
        found = self._of_words(prediction.predictions)
        expected = [numbers[index] for numbers, index in zip(self.split.numbers, found.words, strict=True)]
        return metrics.judge(expected, found.tags, self.tags, each_entity=self.each_entity)

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
        yield from entries_of(self.split.sentences, self.tags, self._of_words(predictions))

    def _of_words(self, predictions: Any) -> Found:
        return words_of(self.split, predictions, self.pooling)

    def _store(self, name: str, text: str) -> None:
        with output_files.stored(f"{name} cannot be written", self.folder, on_error=self.on_error):
            output_files.write_text(self.folder / name, text)


def entries_of(sentences: Sentences, tags: Tags, found: Found) -> Iterator[dict[str, Any]]:
    """Yield what is written of each sentence."""
    for row, place in enumerate(sentences.places):
        given = list(sentences.words[row])
        chosen: list[str | None] = [None] * len(given)
        shares: list[float | None] = [None] * len(given)
        for word, tag, score in zip(found.words[row], found.tags[row], found.scores[row], strict=True):
            chosen[word], shares[word] = tags.names[tag], round(float(score), 6)
        yield {"row": place, "tokens": given, "tags": chosen, "scores": shares}
