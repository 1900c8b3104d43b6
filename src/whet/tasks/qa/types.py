"""Data types of the question answering task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.data.store import RowStore
from whet.jobs.left_out import LeftOut


@dataclass(frozen=True)
class Answers:
    """The reference answers of one question; empty if the context has none."""

    texts: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    """Start of each text in the context, in Unicode code points."""


@dataclass(frozen=True)
class Questions:
    """Questions, column by column, over contexts that are stored once each."""

    ids: Sequence[str]
    questions: Sequence[str]
    answers: Sequence[Answers]
    context_of: np.ndarray
    """Index into `contexts` of each question's context, (questions,) int64."""
    contexts: Sequence[str]
    titles: Sequence[str] = field(default_factory=tuple)
    left_out: LeftOut = field(default_factory=LeftOut)
    """The questions that `skip_bad` skipped: a problem of a paragraph or an article skips all of its questions."""
    fields: Sequence[str] = ()
    """All columns of the data; of SQuAD's nested form, all fields of articles, paragraphs and questions."""

    def __len__(self) -> int:
        return len(self.ids)

    def context(self, question: int) -> str:
        """Return the context of this question."""
        return self.contexts[int(self.context_of[question])]


@dataclass(frozen=True)
class Windows:
    """One row per (question, stretch of its context): the model's input, and the mapping back to characters.

    All per-row arrays are (rows,) int64. A token at index i of row r that belongs to the context is token
    `context_from[r] + i - context_first[r]` of its context, and stands at characters `spans[context_starts[c] + that]`.
    """

    rows: RowStore
    """Columns `input_ids` and, for some models, `token_type_ids`; labels `start_positions` and `end_positions`."""
    question_of: np.ndarray
    context_of: np.ndarray
    context_first: np.ndarray
    """Index in the row of its first context token."""
    context_from: np.ndarray
    """Index, in the tokens of the complete context, of that first context token."""
    n_context: np.ndarray
    """Context tokens in the row."""
    spans: np.ndarray
    """(context tokens, 2) int64: first character and one past the last, of every token of every context."""
    context_starts: np.ndarray
    """(contexts + 1,) int64: index into `spans` at which each context's tokens begin."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class SpanScores:
    """The best starts and ends of each window; the part of the logits that evaluation keeps.

    Arrays (rows, k), best first; where a row has fewer than k tokens the index is -1 and the logit -inf.
    """

    start_index: np.ndarray
    start_logit: np.ndarray
    end_index: np.ndarray
    end_logit: np.ndarray
    null_start: np.ndarray
    """(rows,) float32: the start logit of the row's first token, the guides' "no answer"."""
    null_end: np.ndarray


@dataclass(frozen=True)
class Predictions:
    """The results of decoding by question id, in the order of the questions."""

    best: dict[str, str]
    nbest: dict[str, list[dict[str, float | str]]]
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Position of each entry of `nbest` in its context: first character, one past the last. Empty: no position."""
    null_odds: dict[str, float] | None = None
    """Score of "no answer" minus the best answer's; only with --version_2_with_negative."""
