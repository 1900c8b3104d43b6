"""Windows: the rows of a question and a stretch of its context that a model reads, with the positions of the answers.

Each context and each question is tokenised once; the rows are joined by index arithmetic, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.data.store import RowStore
from whet.errors import ConfigError, DataError
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import EncodedTexts, check_max_length, encode_texts, rust_tokenizer
from whet.tasks.qa.types import Answers, Questions, Windows

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 16384
"""Rows copied at a time, which limits the memory of the index arrays."""


@dataclass(frozen=True)
class Stretches:
    """For each row, a stretch of tokens of one long array."""

    ids: np.ndarray
    begin: np.ndarray
    """(rows,) int64: index into `ids`."""
    length: np.ndarray
    """(rows,) int64."""


@dataclass(frozen=True)
class JoinedRows:
    """Rows end to end."""

    ids: np.ndarray
    """(tokens,) int32."""
    types: np.ndarray
    """(tokens,) uint8: the token types."""
    cu_seqlens: np.ndarray
    """(rows + 1,) int64."""
    part_starts: np.ndarray
    """(rows, parts) int64: index into `ids` at which each part of the template begins."""


@dataclass(frozen=True)
class PairTemplate:
    """The parts of a row in order: special tokens, and two texts among them."""

    tokens: tuple[int | None, ...]
    """One special token per part; None means a text, first the question and then the context, or the reverse."""
    types: tuple[int, ...]
    """The token type of each part."""
    no_answer: int
    """The part at which questions without an answer point: the CLS token, else BOS, else the row's first."""

    @property
    def texts(self) -> tuple[int, int]:
        """The parts that are the two texts."""
        first, second = (part for part, token in enumerate(self.tokens) if token is None)
        return first, second

    @property
    def n_special(self) -> int:
        """Special tokens in a row."""
        return len(self.tokens) - 2

    def join(self, first: Stretches, second: Stretches) -> JoinedRows:
        """Return one row for each pair of stretches."""
        lengths = np.ones((len(first.begin), len(self.tokens)), dtype=np.int64)
        lengths[:, self.texts[0]], lengths[:, self.texts[1]] = first.length, second.length
        ends = np.cumsum(lengths.ravel())
        starts = (ends - lengths.ravel()).reshape(lengths.shape)
        ids = np.empty(ends[-1], dtype=np.int32)
        for part, token in enumerate(self.tokens):
            if token is not None:
                ids[starts[:, part]] = token
        for part, text in zip(self.texts, (first, second), strict=True):
            _copy_stretches(text, into=ids, at=starts[:, part])
        types = np.repeat(np.tile(np.asarray(self.types, dtype=np.uint8), len(lengths)), lengths.ravel())
        return JoinedRows(ids=ids, types=types, cu_seqlens=np.append(starts[:, 0], ends[-1]), part_starts=starts)


def find_template(tokenizer: PreTrainedTokenizerBase, rust: Tokenizer, first: str, second: str) -> PairTemplate:
    """Return the template by which this tokenizer joins two texts, derived from these two and checked with them.

    Raise ConfigError if it joins them in any other way than [special tokens] A [special tokens] B [special tokens], or
    if the complete tokenizer gives another result than the template.
    """
    pair = rust.encode(first, second)
    runs = [
        (text, [i for i, _ in run]) for text, run in groupby(enumerate(pair.sequence_ids), key=lambda item: item[1])
    ]
    tokens: list[int | None] = []
    types: list[int] = []
    for text, places in runs:
        tokens += [pair.ids[i] for i in places] if text is None else [None]
        types += [pair.type_ids[i] for i in places] if text is None else [pair.type_ids[places[0]]]
    template = PairTemplate(tuple(tokens), tuple(types), _no_answer(tokenizer, tokens))
    plain = [rust.encode(text, add_special_tokens=False) for text in (first, second)]
    _check(template, [text for text, _ in runs if text is not None], plain, _ask(tokenizer, first, second))
    return template


def _no_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int | None]) -> int:
    for token in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if token is not None and token in tokens:
            return tokens.index(token)
    return 0


def _ask(tokenizer: PreTrainedTokenizerBase, first: str, second: str) -> tuple[list[int], list[int]]:
    """Return the ids and the token types that the tokenizer gives the two texts through its public interface."""
    encoded = tokenizer(first, second, return_token_type_ids=True, verbose=False)
    return list(encoded["input_ids"]), list(encoded["token_type_ids"])


def _check(template: PairTemplate, order: list[int], plain: list[Encoding], asked: tuple[list[int], list[int]]) -> None:
    ids: list[int] = []
    types: list[int] = []
    texts = iter(plain)
    for token, kind in zip(template.tokens, template.types, strict=True):
        piece = [token] if token is not None else next(texts, plain[-1]).ids
        ids += piece
        types += [kind] * len(piece)
    if order != [0, 1] or (ids, types) != asked:
        raise ConfigError(
            what="the tokenizer joins question and context in a way that is not known here",
            got=f"input_ids {asked[0][:40]}, token_type_ids {asked[1][:40]}",
            why="windows are put together as [special tokens] A [special tokens] B [special tokens], nothing else",
            fix="choose a model whose tokenizer joins two texts so, as those of BERT, RoBERTa and their kin do",
        )


def _copy_stretches(stretches: Stretches, *, into: np.ndarray, at: np.ndarray) -> None:
    """Copy the stretch of each row to its position, many rows at a time."""
    for i in range(0, len(at), _ROWS_AT_ONCE):
        rows = slice(i, i + _ROWS_AT_ONCE)
        length = stretches.length[rows]
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        source = within + np.repeat(stretches.begin[rows], length)
        into[within + np.repeat(at[rows], length)] = stretches.ids[source]


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


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How windows are cut."""

    max_seq_length: int = 384
    """Largest number of tokens in a row: question, context and special tokens."""
    doc_stride: int = 128
    """Context tokens that a window shares with the previous one."""
    with_labels: bool = True
    """Whether rows carry `start_positions` and `end_positions`."""


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


_LAYOUT = 1
"""Increase this when the same input gives other windows, or the file has another form."""
_PER_ROW = [field.name for field in fields(Windows) if field.name != "rows"]


def cached_windows(
    questions: Questions,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    cache_dir: Path | None = None,
    overwrite_cache: bool = False,
    n_threads: int | None = None,
) -> Windows:
    """Return the windows of all questions: from the cache (`Cache`) if it has them, else from `make_windows`.

    The number of threads changes neither the windows nor their name.
    """

    def made() -> dict[str, np.ndarray]:
        windows = make_windows(questions, tokenizer, options, n_threads=n_threads)
        return windows.rows.arrays() | {name: getattr(windows, name) for name in _PER_ROW}

    cache = Cache(rows="windows", folder=cache_dir, overwrite=overwrite_cache)
    arrays = cache.take(windows_key(questions, tokenizer, options), made)
    return Windows(rows=RowStore.from_arrays(arrays), **{name: arrays[name] for name in _PER_ROW})


def windows_key(questions: Questions, tokenizer: PreTrainedTokenizerBase, options: WindowOptions) -> str:
    """Return 32 hex digits a hash of everything that windows depend on: texts, answers, tokenizer, options, code."""
    key = Key(_LAYOUT, tokenizer, asdict(options))
    key.add_texts(questions.questions)
    key.add_texts(questions.contexts)
    key.add_numbers(questions.context_of)
    key.add_texts(list(chain.from_iterable(answers.texts for answers in questions.answers)))
    key.add_numbers([len(answers.texts) for answers in questions.answers])
    key.add_numbers(list(chain.from_iterable(answers.starts for answers in questions.answers)))
    return key.hex()
