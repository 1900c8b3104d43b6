"""The first and last token of the answer in a window, found by characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.errors import ConfigError
from whet.tasks.qa.types import Answers, Windows


def span_labels(answers: Sequence[Answers], windows: Windows, no_answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last token of each row's answer, (rows,) int64 each, as positions in the row.

    Of several answers the first counts. It stands at characters [s, e) of the context, and is in a window if the
    window's first context token begins at or before s and its last one ends at or after e. Then the label is the last
    context token that begins at or before s, and the first one that ends at or after e. (Where several tokens share
    one character, as byte-level BPE makes them, that end can come before that start; then the two are swapped.) Rows
    without the answer get `no_answer` twice.

    This is what run_qa.py means to do. In its search the special token after the context, whose offsets are (0, 0),
    passes for one that begins before s: an answer in the last context token gets a start behind it. Not so here.
    """
    first_char = np.array([answer.starts[0] if answer.texts else -1 for answer in answers], dtype=np.int64)
    n_chars = np.array([len(answer.texts[0]) if answer.texts else 0 for answer in answers], dtype=np.int64)
    start_position, end_position = no_answer.copy(), no_answer.copy()
    rows = np.flatnonzero((first_char[windows.question_of] >= 0) & (windows.n_context > 0))
    begin = first_char[windows.question_of[rows]]
    end = begin + n_chars[windows.question_of[rows]]
    low = windows.context_starts[windows.context_of[rows]] + windows.context_from[rows]
    high = low + windows.n_context[rows] - 1
    inside = (windows.spans[low, 0] <= begin) & (windows.spans[high, 1] >= end)
    rows, begin, end, low, high = (array[inside] for array in (rows, begin, end, low, high))

    first, last = _find(windows, windows.context_of[rows], begin, end)
    first, last = np.minimum(first, high), np.maximum(last, low)
    to_row = windows.context_first[rows] - low
    start_position[rows] = np.minimum(first, last) + to_row
    end_position[rows] = np.maximum(first, last) + to_row
    return start_position, end_position


def _find(windows: Windows, context: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, as indices into `spans`, the last token that begins at or before `begin` and the first that ends there.

    All contexts are searched at once: each gets its own range of numbers, so that one sorted array holds them all.
    """
    width = int(windows.spans.max(initial=0)) + 1
    n_contexts = len(windows.context_starts) - 1
    offset = np.repeat(np.arange(n_contexts) * width, np.diff(windows.context_starts))
    begins, ends = windows.spans[:, 0] + offset, windows.spans[:, 1] + offset
    if np.any(np.diff(begins) < 0) or np.any(np.diff(ends) < 0):
        raise ConfigError(
            what="the tokenizer gives tokens out of the order of their characters",
            why="answers are found by searching the tokens of a context in order",
            fix="name another model, or another tokenizer in --tokenizer_name",
        )
    first = np.searchsorted(begins, context * width + begin, side="right") - 1
    return first, np.searchsorted(ends, context * width + end, side="left")
