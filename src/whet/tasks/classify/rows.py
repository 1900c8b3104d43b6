"""A split's rows with their labels, and what is left of its examples for the judgement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from whet.data.store import RowStore
from whet.jobs.tokenising.rows import RowMaker, RowOptions, TextRows
from whet.log import logger
from whet.tasks.classify.examples import Examples
from whet.tasks.classify.labels import Scheme


@dataclass(frozen=True)
class Split:
    """Examples, their rows, and their labels as numbers (texts, ...); None if they have none."""

    examples: Examples
    rows: TextRows
    labels: np.ndarray | None

    @property
    def dataset(self) -> RowStore:
        """The rows with their labels; each window has the label of its text."""
        labels = {} if self.labels is None else {"labels": self.labels[self.rows.text_of]}
        return replace(self.rows.rows, labels=labels)


def tokenised(name: str, examples: Examples, scheme: Scheme, maker: RowMaker) -> Split:
    """Return the split's rows and labels; of a test split without known labels the labels are None."""
    labels = None
    if name != "test" or scheme.knows_all(examples):
        labels = scheme.encode(examples)
    elif examples.labels is not None:
        logger.warning("test: some labels are missing or unknown to the model, so it gets no metrics")
    rows = maker.rows(examples.texts, examples.pairs)
    split = Split(examples, rows, labels)
    _describe(name, split, maker.options)
    return split


def _describe(name: str, split: Split, options: RowOptions) -> None:
    """Log what the split holds, what was cut, and what padding would have cost."""
    n_rows, n_tokens = len(split.rows.rows), int(split.rows.rows.cu_seqlens[-1])
    logger.info(
        "%s: %d rows, %.0f of %d tokens real: packing computes %.0f %% of what padding would",
        name,
        n_rows,
        n_tokens / n_rows,
        options.max_seq_length,
        100 * n_tokens / (n_rows * options.max_seq_length),
    )
    if not split.rows.n_cut:
        return
    done = f"read in windows of {options.max_seq_length} tokens"
    if options.doc_stride is None:
        done = f"cut at max_seq_length {options.max_seq_length} (--doc_stride reads them in windows)"
    n_cut, n_texts = split.rows.n_cut, len(split.examples)
    logger.warning("%s: %d of %d texts are longer than a row and were %s", name, n_cut, n_texts, done)
