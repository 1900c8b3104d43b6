"""The possible answers of all questions, as columns of numbers, processed without a Python loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.tasks.qa.types import SpanScores, Windows

_PAIRS_AT_ONCE = 1 << 20
"""Start and end pairs processed at a time, which limits the memory for any number of windows."""


@dataclass(frozen=True)
class Candidates:
    """Possible answers, column by column, (candidates,) each."""

    question: np.ndarray
    """int64 index of the question."""
    begin: np.ndarray
    """int64, first character of the answer in the context."""
    end: np.ndarray
    """int64, one past its last character; an answer without characters is the empty text."""
    start_logit: np.ndarray
    end_logit: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """The sum of both logits, float32 as in the guides' script: equality of scores depends on it."""
        return self.start_logit + self.end_logit

    @property
    def has_text(self) -> np.ndarray:
        """True if the answer has characters, (candidates,) bool."""
        return self.end > self.begin

    def take(self, which: np.ndarray) -> Candidates:
        """Return these candidates, by index or by mask."""
        return Candidates(*(column[which] for column in self._columns()))

    def by_question(self) -> Candidates:
        """Return them sorted by question, with the order within a question unchanged."""
        return self.take(np.argsort(self.question, kind="stable"))

    @classmethod
    def join(cls, parts: Sequence[Candidates]) -> Candidates:
        """Return the candidates of all parts, one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*(part._columns() for part in parts), strict=True)))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.question, self.begin, self.end, self.start_logit, self.end_logit


def best_of_each(group: np.ndarray, score: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n highest scores of each group, best first; the first among equals."""
    order = np.lexsort((-score, group))
    grouped = group[order]
    rank = np.arange(len(order)) - np.searchsorted(grouped, grouped)
    return order[rank < n]


def text_candidates(windows: Windows, scores: SpanScores, *, n_best: int, max_tokens: int) -> Candidates:
    """Return the n_best spans of each window that are in the context and have at most `max_tokens` tokens.

    Window by window, best first. A span pairs one of the window's n_best starts with one of its n_best ends.
    """
    rows_at_once = max(1, _PAIRS_AT_ONCE // n_best**2)
    firsts = range(0, max(1, len(windows)), rows_at_once)
    chunks = (np.arange(first, min(first + rows_at_once, len(windows))) for first in firsts)
    return Candidates.join([_spans(windows, scores, rows, n_best=n_best, max_tokens=max_tokens) for rows in chunks])


def null_candidates(windows: Windows, scores: SpanScores) -> Candidates:
    """Return "no answer" of every question that has a window, by question: the window with the lowest score decides.

    A window that does not hold the answer says "no answer" with right; only when all of them do is there none.
    """
    lowest = best_of_each(windows.question_of, -(scores.null_start + scores.null_end), 1)
    nowhere = np.zeros(len(lowest), dtype=np.int64)
    return Candidates(windows.question_of[lowest], nowhere, nowhere, scores.null_start[lowest], scores.null_end[lowest])


def _spans(windows: Windows, scores: SpanScores, rows: np.ndarray, *, n_best: int, max_tokens: int) -> Candidates:
    starts, ends = scores.start_index[rows, :n_best], scores.end_index[rows, :n_best]
    n_tokens = ends[:, None, :] - starts[:, :, None] + 1  # (rows, starts, ends)
    inside = _in_context(windows, rows, starts)[:, :, None] & _in_context(windows, rows, ends)[:, None, :]
    at, start, end = np.nonzero(inside & (n_tokens >= 1) & (n_tokens <= max_tokens))
    row, start_index, end_index = rows[at], starts[at, start], ends[at, end]
    found = Candidates(
        windows.question_of[row],
        windows.spans[_context_token(windows, row, start_index), 0],
        windows.spans[_context_token(windows, row, end_index), 1],
        scores.start_logit[row, start],
        scores.end_logit[row, end],
    )
    # Reduced per window: the best of a question are among the best of its windows, which are far fewer.
    return found.take(best_of_each(row, found.score, n_best))


def _in_context(windows: Windows, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    offset = index - windows.context_first[rows, None]
    return (offset >= 0) & (offset < windows.n_context[rows, None])


def _context_token(windows: Windows, row: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the index into `windows.spans` of the token at `index` of its row."""
    first = windows.context_starts[windows.context_of[row]] + windows.context_from[row]
    return first + index - windows.context_first[row]
