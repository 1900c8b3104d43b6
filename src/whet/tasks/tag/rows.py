"""A split's rows with the labels of their tokens, and the numbers of the words' tags."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from whet.data.store import RowStore
from whet.jobs.tokenising.words import WordRowMaker, WordRows
from whet.log import logger
from whet.tasks.tag.labels import Tags, token_labels
from whet.tasks.tag.sentences import Sentences


@dataclass(frozen=True)
class Split:
    """Sentences, their rows, and the number of each word's tag; None if they have none."""

    sentences: Sentences
    rows: WordRows
    numbers: list[np.ndarray] | None
    labels: np.ndarray | None
    """(tokens,) int64."""

    @property
    def dataset(self) -> RowStore:
        """The rows with the labels of their tokens."""
        if self.labels is None:
            return self.rows.rows
        return replace(self.rows.rows, tokens={**self.rows.rows.tokens, "labels": self.labels})


def tokenised(name: str, sentences: Sentences, tags: Tags, maker: WordRowMaker, *, all_pieces: bool) -> Split:
    """Return the split's rows and labels; of a test split without known tags the labels are None."""
    numbers = None
    if name != "test" or tags.knows_all(sentences):
        numbers = tags.encode(sentences)
    elif sentences.tags is not None:
        logger.warning("test: some tags are unknown to the model, so it gets no metrics")
    rows = maker.rows(sentences.words)
    labels = None if numbers is None else token_labels(rows, numbers, tags, all_pieces=all_pieces)
    n_lost = sum(map(len, sentences.words)) - rows.n_words
    if n_lost:
        logger.warning(
            "%s: %d words are not read: %sthe tokenizer knows no piece of them",
            name,
            n_lost,
            ""
            if maker.doc_stride is not None
            else f"they stand after max_seq_length {maker.max_seq_length} (--doc_stride reads them in windows), or ",
        )
    return Split(sentences, rows, numbers, labels)
