"""Cuts contexts into windows that a model can read, each joined with its question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from whet.data.store import RowStore
from whet.errors import ConfigError, DataError
from whet.jobs.tokenising.encode import EncodedTexts, check_max_length, encode_texts, rust_tokenizer
from whet.tasks.qa.types import Questions, Windows
from whet.tasks.qa.windows.labels import span_labels
from whet.tasks.qa.windows.pair_template import PairTemplate, Stretches, find_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How windows are cut."""

    max_seq_length: int = 384
    """Largest number of tokens in a row: question, context and special tokens."""
    doc_stride: int = 128
    """Context tokens that a window shares with the previous one."""
    with_labels: bool = True
    """Whether rows carry `start_positions` and `end_positions`."""

    def __post_init__(self) -> None:
        if self.doc_stride < 0 or self.max_seq_length < 1:
            raise ConfigError(
                what="the windows cannot be cut",
                got=f"max_seq_length {self.max_seq_length}, doc_stride {self.doc_stride}",
                why="a row has at least one token, and windows leave nothing out",
                fix="use --max_seq_length 1 or more and --doc_stride 0 or more",
            )


@dataclass(frozen=True)
class _Encoded:
    questions: EncodedTexts
    contexts: EncodedTexts
    template: PairTemplate


@dataclass(frozen=True)
class _Cuts:
    """The context and the stretch of it in each row; arrays (rows,) int64."""

    question_of: np.ndarray
    context_from: np.ndarray
    n_context: np.ndarray


def make_windows(
    questions: Questions,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    n_threads: int | None = None,
) -> Windows:
    """Return the windows of all questions, in their order; no padding is stored.

    The rows are those that run_qa.py gets from the tokenizer with truncation of the context, `stride` and overflowing
    tokens: question first, or context first if the tokenizer pads on the left. But every context and every question is
    tokenised only once, and the rows are put together from that. (One trace of the other way is left out: RoBERTa's
    tokenizer with `add_prefix_space` counts the space before the first context token of later windows to that token.)
    Labels are as `span_labels` says, `n_threads` as in `encode_texts`. Raise ConfigError for a tokenizer or for lengths
    that cannot work.
    """
    check_max_length(options.max_seq_length, tokenizer)
    rust = rust_tokenizer(tokenizer)
    asked = encode_texts(rust, [question.lstrip() for question in questions.questions], n_threads=n_threads)
    contexts = encode_texts(rust, questions.contexts, with_spans=True, n_threads=n_threads)
    template = _template(questions, asked, contexts, tokenizer, rust)
    room = options.max_seq_length - template.n_special - asked.lengths
    n_tokens = contexts.lengths[questions.context_of]
    _check_room(questions, options, room, n_tokens)
    cuts = _cut(room, n_tokens, options.doc_stride, from_left=tokenizer.truncation_side == "left")
    return _windows(questions, _Encoded(asked, contexts, template), cuts, tokenizer, options)


def _template(
    questions: Questions,
    asked: EncodedTexts,
    contexts: EncodedTexts,
    tokenizer: PreTrainedTokenizerBase,
    rust: Tokenizer,
) -> PairTemplate:
    """Find how the tokenizer joins two texts, with the first question that has a context."""
    usable = np.flatnonzero((asked.lengths > 0) & (contexts.lengths[questions.context_of] > 0))
    if len(usable) == 0:
        raise DataError(
            what="there is no question with tokens in it and in its context",
            got=f"{len(questions)} questions",
            why="there is nothing to train on, to evaluate or to answer",
            fix="check that the data and the tokenizer are of the same language",
        )
    first = int(usable[0])
    place = int(questions.context_of[first])
    begin, end = contexts.starts[place : place + 2]
    some = min(contexts.spans[min(begin + _TEMPLATE_TOKENS, end) - 1, 1], contexts.spans[begin, 0] + _TEMPLATE_CHARS)
    texts = questions.questions[first].lstrip()[:_TEMPLATE_CHARS], questions.context(first)[: int(some)]
    return find_template(tokenizer, rust, *(texts if _question_first(tokenizer) else texts[::-1]))


_TEMPLATE_TOKENS, _TEMPLATE_CHARS = 256, 10_000
"""Of a context, with which the template is looked for: a book need not be tokenised again, while no signal is heard."""


def _question_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.padding_side == "right"


def _check_room(questions: Questions, options: WindowOptions, room: np.ndarray, n_tokens: np.ndarray) -> None:
    """Raise ConfigError, with the worst question, if windows would not advance in their context."""
    stuck = np.flatnonzero((n_tokens > room) & (room <= options.doc_stride))
    if len(stuck) == 0:
        return
    worst = stuck[np.argmin(room[stuck])]
    left = int(room[worst])
    others = f"; in all {len(stuck)} questions are too long" if len(stuck) > 1 else ""
    shorter = f"--doc_stride {left - 1} or less, or " if left > 0 else ""
    raise ConfigError(
        what=f"question {questions.ids[worst]!r} leaves too little room for its context",
        got=f"with special tokens it takes {options.max_seq_length - left} tokens of max_seq_length "
        f"{options.max_seq_length}; that leaves {left} for the context, and doc_stride is {options.doc_stride}{others}",
        why="a window repeats doc_stride tokens of the one before, so it has to hold more than these",
        fix=f"{shorter}--max_seq_length {options.max_seq_length - left + options.doc_stride + 1} or more, "
        "or shorten the question",
    )


def _cut(room: np.ndarray, n_tokens: np.ndarray, doc_stride: int, *, from_left: bool) -> _Cuts:
    """Return the windows over contexts of `n_tokens` that have up to `room` tokens; arrays (questions,).

    `from_left`: the tokenizer cuts on the left, so the first window lies at the context's end.
    """
    step = np.maximum(room - doc_stride, 1)  # contexts that fit into one window need no step
    n_windows = 1 + np.maximum(-(-(n_tokens - room) // step), 0)
    question_of = np.repeat(np.arange(len(room)), n_windows)
    number = np.arange(len(question_of)) - np.repeat(np.cumsum(n_windows) - n_windows, n_windows)
    n_tokens, room, skipped = n_tokens[question_of], room[question_of], number * step[question_of]
    begin = np.maximum(n_tokens - skipped - room, 0) if from_left else skipped
    end = n_tokens - skipped if from_left else np.minimum(begin + room, n_tokens)
    return _Cuts(question_of, begin, end - begin)


def _windows(
    questions: Questions,
    encoded: _Encoded,
    cuts: _Cuts,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
) -> Windows:
    asked, contexts, template = encoded.questions, encoded.contexts, encoded.template
    context_of = questions.context_of[cuts.question_of]
    question = Stretches(asked.ids, asked.starts[cuts.question_of], asked.lengths[cuts.question_of])
    context = Stretches(contexts.ids, contexts.starts[context_of] + cuts.context_from, cuts.n_context)
    question_first = _question_first(tokenizer)
    joined = template.join(*((question, context) if question_first else (context, question)))
    tokens = {"input_ids": joined.ids}
    if "token_type_ids" in tokenizer.model_input_names:
        tokens["token_type_ids"] = joined.types
    in_row = joined.part_starts - joined.cu_seqlens[:-1, None]
    windows = Windows(
        rows=RowStore(cu_seqlens=joined.cu_seqlens, tokens=tokens),
        question_of=cuts.question_of,
        context_of=context_of,
        context_first=np.ascontiguousarray(in_row[:, template.texts[1 if question_first else 0]]),
        context_from=cuts.context_from,
        n_context=cuts.n_context,
        spans=contexts.spans,
        context_starts=contexts.starts,
    )
    if not options.with_labels:
        return windows
    start, end = span_labels(questions.answers, windows, in_row[:, template.no_answer])
    return replace(windows, rows=replace(windows.rows, labels={"start_positions": start, "end_positions": end}))
