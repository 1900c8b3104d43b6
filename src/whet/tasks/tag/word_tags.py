"""From the logits of tokens to the tags of words: those of each word's first piece, from one row or several windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from whet.jobs.fields import Pooling
from whet.jobs.pooling import pooled
from whet.tasks.tag.rows import Split


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
