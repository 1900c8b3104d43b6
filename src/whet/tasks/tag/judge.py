"""From the logits of tokens to the tags of words, and how these are judged: entities by seqeval, plain tags by F1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.jobs import metrics
from whet.jobs.fields import Pooling
from whet.jobs.judging import PredictionJudge, pooled
from whet.log import logger
from whet.optional import extra, require
from whet.tasks.tag.labels import Tags
from whet.tasks.tag.rows import Split
from whet.tasks.tag.sentences import Sentences


@dataclass(frozen=True)
class Found:
    """The words of each sentence that were read, with their tags as numbers and the probabilities of these."""

    words: list[np.ndarray]
    tags: list[np.ndarray]
    scores: list[np.ndarray]


def best_tags(logits: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tag of each token and its probability, both (rows, T): all that is kept of the logits."""
    scores = only_logits(logits, labels).float().softmax(-1)
    best = scores.max(-1)
    return best.indices, best.values


def only_logits(logits: Any, labels: Any) -> torch.Tensor:
    """Return the logits of a model that gives more after them."""
    del labels
    return logits[0] if isinstance(logits, tuple) else logits


def words_of(split: Split, predictions: Any, pooling: Pooling) -> Found:
    """Return the tags of the words from what `best_tags`, or with windows `only_logits`, has kept of all rows."""
    if isinstance(predictions, tuple):
        return of_tokens(split, *predictions)
    return of_windows(split, predictions, pooling)


def of_tokens(split: Split, best: np.ndarray, scores: np.ndarray) -> Found:
    """Return the tags of the words from those of the tokens (rows, T), for one row a sentence."""
    places = [split.rows.first_pieces(row) for row in range(len(split.sentences))]
    return Found(
        words=[index for index, _ in places],
        tags=[best[row][place].astype(np.int64) for row, (_, place) in enumerate(places)],
        scores=[scores[row][place] for row, (_, place) in enumerate(places)],
    )


def of_windows(split: Split, logits: np.ndarray, pooling: Pooling) -> Found:
    """Return the tags of the words from the logits of the tokens (rows, T, labels), pooled over windows."""
    words, values = [], []
    for row in range(len(split.rows.rows)):
        index, places = split.rows.first_pieces(row)
        words.append(index)
        values.append(logits[row][places])
    found = Found([], [], [])
    last = np.searchsorted(split.rows.text_of, np.arange(len(split.sentences)), side="right")
    for begin, end in zip([0, *last[:-1]], last, strict=True):
        _add(found, np.concatenate(words[begin:end]), np.concatenate(values[begin:end]), pooling)
    return found


def _add(found: Found, words: np.ndarray, logits: np.ndarray, pooling: Pooling) -> None:
    """Add the words of one sentence, whose windows follow each other."""
    order = np.argsort(words, kind="stable")
    if len(words):
        logits = pooled(logits[order], words[order], pooling)
    best, scores = best_tags(torch.from_numpy(np.asarray(logits, dtype=np.float64)), None)
    found.words.append(np.unique(words))
    found.tags.append(best.numpy().astype(np.int64))
    found.scores.append(scores.numpy())


INSTALL = extra("tag")
_BIOES = {"L-": "E-", "U-": "S-"}
"""The last word of an entity, and a word alone, as BILOU writes them -> as seqeval reads them."""


def metrics_of_tags(
    expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tags: Tags, *, each_entity: bool
) -> dict[str, float]:
    """Return the metrics of the words' tags, given as numbers, sentence by sentence."""
    flat_expected, flat_found = np.concatenate(expected), np.concatenate(found)
    accuracy = float((flat_expected == flat_found).mean())
    if not tags.are_entities:
        counts = metrics.confusion(flat_expected, flat_found, len(tags.names))
        return {"accuracy": accuracy, "f1_macro": metrics.macro_f1(counts)}
    try:
        seqeval = require("seqeval.metrics", needed_for="F1 of entities", install=INSTALL)
    except ConfigError:
        logger.warning("accuracy of words alone: precision, recall and F1 of entities need: pip install %s", INSTALL)
        return {"accuracy": accuracy}
    known = [re.sub("^[LU]-", lambda mark: _BIOES[mark[0]], name) for name in tags.names]
    names = [[known[n] for n in one] for one in expected], [[known[n] for n in one] for one in found]
    values = {
        "precision": float(seqeval.precision_score(*names, zero_division=0)),
        "recall": float(seqeval.recall_score(*names, zero_division=0)),
        "f1": float(seqeval.f1_score(*names, zero_division=0)),
        "accuracy": accuracy,
    }
    return values | (_of_each_entity(seqeval, names) if each_entity else {})


def _of_each_entity(seqeval: Any, names: Any) -> dict[str, float]:
    report = seqeval.classification_report(*names, output_dict=True, zero_division=0)
    words = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}
    return {
        f"{entity}_{word}": float(values[theirs])
        for entity, values in report.items()
        if not entity.endswith(" avg")
        for word, theirs in words.items()
    }


@dataclass(frozen=True)
class TagJudge(PredictionJudge):
    """Judges a model on one split, by the first piece of each word."""

    split: Split
    tags: Tags
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    each_entity: bool = False
    pooling: Pooling = "mean"
    """How the logits of a word in several windows become one."""

    @property
    def dataset(self) -> RowStore:
        """The rows of the split, with their labels."""
        return self.split.dataset

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction; its predictions are logits, or those of `best_tags`."""
        if self.split.numbers is None:
            return {}
        found = self._of_words(prediction.predictions)
        expected = [numbers[index] for numbers, index in zip(self.split.numbers, found.words, strict=True)]
        return metrics_of_tags(expected, found.tags, self.tags, each_entity=self.each_entity)

    def write(self, predictions: Any, prefix: str) -> None:
        """Write words, tags and scores as JSON lines; a test split also as run_ner.py does: tags alone, a line each."""
        entries = list(self.entries(predictions))
        self.store(
            f"{prefix}_predictions.jsonl", "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in entries)
        )
        if prefix == "predict":
            lines = (" ".join(tag for tag in one["tags"] if tag is not None) for one in entries)
            self.store("predictions.txt", "".join(f"{line}\n" for line in lines))

    def entries(self, predictions: Any) -> Iterator[dict[str, Any]]:
        """Yield for each sentence its words with their tags and scores; None for a word that was not read."""
        yield from entries_of(self.split.sentences, self.tags, self._of_words(predictions))

    def _of_words(self, predictions: Any) -> Found:
        return words_of(self.split, predictions, self.pooling)


def entries_of(sentences: Sentences, tags: Tags, found: Found) -> Iterator[dict[str, Any]]:
    """Yield what is written of each sentence."""
    for row, place in enumerate(sentences.places):
        given = list(sentences.words[row])
        chosen: list[str | None] = [None] * len(given)
        shares: list[float | None] = [None] * len(given)
        for word, tag, score in zip(found.words[row], found.tags[row], found.scores[row], strict=True):
            chosen[word], shares[word] = tags.names[tag], round(float(score), 6)
        yield {"row": place, "tokens": given, "tags": chosen, "scores": shares}
