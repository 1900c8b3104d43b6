"""The way a tokenizer joins a question and a context, found by calling it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from whet.errors import ConfigError

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
