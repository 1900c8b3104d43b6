"""Sentences that come as words, as the rows that a model reads; each token knows its word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.jobs.tokenising import progress
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import check_max_length, each, rust_tokenizer
from whet.models.loading.tokenizer_check import rust_errors

_LAYOUT = 2
"""Raise this when the same input shall give other rows, or the file looks different."""
_SENTENCES = 512
NO_WORD = -1


@dataclass(frozen=True)
class WordRows:
    """One row a sentence, or several windows of it, in the order of the sentences."""

    rows: RowStore
    word_of: np.ndarray
    """(tokens,) int64: the word of the sentence that each token is a piece of; -1 for special tokens, and for pieces at
    the beginning of a window that continue a word of the window before."""
    text_of: np.ndarray
    """(rows,) int64: the sentence that each row is a part of."""

    @cached_property
    def is_first(self) -> np.ndarray:
        """Whether each token is the first piece of a word, (tokens,) bool."""
        same = np.diff(self.word_of, prepend=NO_WORD - 1) == 0
        same[self.rows.cu_seqlens[:-1]] = False
        return (self.word_of != NO_WORD) & ~same

    @property
    def n_words(self) -> int:
        """The number of words that some row holds; a word in several windows counts once."""
        sentence = np.repeat(self.text_of, self.rows.lengths)[self.is_first]
        return np.unique(np.stack([sentence, self.word_of[self.is_first]]), axis=1).shape[1]

    def first_pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of a row that have pieces, and where in the row the first piece of each is."""
        span = slice(self.rows.cu_seqlens[row], self.rows.cu_seqlens[row + 1])
        places = np.flatnonzero(self.is_first[span])
        return self.word_of[span][places], places


@dataclass(frozen=True)
class WordRowMaker:
    """What makes the rows of a run, and where they are kept."""

    tokenizer: Any
    max_seq_length: int
    cache: Cache
    doc_stride: int | None = None
    """Tokens that two windows of a sentence share; None: what does not fit is cut."""
    n_threads: int | None = None
    """As in `encode.each`."""

    def rows(self, sentences: Sequence[Sequence[str]]) -> WordRows:
        """Return the rows of these sentences: from the cache if it has them."""
        windows = {} if self.doc_stride is None else {"doc_stride": self.doc_stride}
        key = Key(_LAYOUT, self.tokenizer, {"words": True, "max_seq_length": self.max_seq_length, **windows})
        key.add_numbers([len(words) for words in sentences])
        key.add_texts(list(chain.from_iterable(sentences)))
        arrays = self.cache.take(key.hex(), lambda: self._make(sentences))
        return WordRows(RowStore.from_arrays(arrays), arrays["word_of"], arrays["text_of"])

    def _make(self, sentences: Sequence[Sequence[str]]) -> Mapping[str, np.ndarray]:
        check_max_length(self.max_seq_length, self.tokenizer)
        rust = with_spaces(rust_tokenizer(self.tokenizer))
        room = self._room(rust)
        rust.enable_truncation(**truncation(self.tokenizer, self.max_seq_length, self.doc_stride))

        def encode(begin: int) -> list[_Window]:
            batch = [list(one) for one in sentences[begin : begin + _SENTENCES]]
            with rust_errors(f"a sentence among these: {' '.join(batch[0])[:60]!r} ..."):
                encodings = rust.encode_batch(batch, is_pretokenized=True)
            found = []
            for n, encoding in enumerate(encodings, start=begin):
                windows = [encoding] if self.doc_stride is None else [encoding, *encoding.overflowing]
                for one, words in zip(windows, _words_of(windows, room, self.doc_stride or 0), strict=True):
                    columns = (np.int32, one.ids), (np.uint8, one.type_ids), (np.int64, words)
                    found.append(_Window(n, *(np.asarray(values, kind) for kind, values in columns)))
            count(sum(len(word) for sentence in batch for word in sentence))
            return found

        with progress.reported(sum(len(word) for sentence in sentences for word in sentence)) as count:
            windows = list(chain.from_iterable(each(range(0, len(sentences), _SENTENCES), encode, self.n_threads)))
        text_of, ids, types, words = zip(*windows, strict=True)
        tokens = {"input_ids": np.concatenate(ids)}
        if "token_type_ids" in self.tokenizer.model_input_names:
            tokens["token_type_ids"] = np.concatenate(types)
        starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int64)
        found = {"word_of": np.concatenate(words), "text_of": np.asarray(text_of, dtype=np.int64)}
        return RowStore(starts, tokens).arrays() | found

    def _room(self, rust: Tokenizer) -> int:
        """Return the tokens of words in a row; ConfigError if windows could not move on."""
        n_special, shared = rust.num_special_tokens_to_add(False), self.doc_stride or 0
        room = self.max_seq_length - n_special
        if room > shared:
            return room
        raise ConfigError(
            what="max_seq_length leaves no room for words",
            got=f"max_seq_length {self.max_seq_length}; special tokens take {n_special}"
            + (f", and windows share {shared}" if shared else ""),
            why="each row holds a token of a word that the row before it does not hold",
            fix=f"use --max_seq_length {n_special + shared + 1} or more"
            + (", or a smaller --doc_stride" if shared else ""),
        )


def truncation(tokenizer: Any, max_seq_length: int, doc_stride: int | None) -> dict[str, Any]:
    """Return how sentences are cut, as arguments of `tokenizers.Tokenizer.enable_truncation`."""
    side = tokenizer.truncation_side if doc_stride is None else "right"  # windows hold everything anyway
    return {"max_length": max_seq_length, "stride": doc_stride or 0, "strategy": "longest_first", "direction": side}


class _Window(NamedTuple):
    """One row: its sentence, and for each token its id, its type and its word."""

    sentence: int
    ids: np.ndarray
    types: np.ndarray
    words: np.ndarray


def _words_of(windows: Sequence[Encoding], room: int, shared: int) -> Iterator[list[int]]:
    """Yield the word of each token of each window; pieces that continue a word of the window before have none."""
    before: list[int] = []
    for window in windows:
        words = [NO_WORD if word is None else word for word in window.word_ids]
        own = [word for word in words if word != NO_WORD]
        begins_inside = before and own and before[room - shared - 1] == own[0]
        yield [NO_WORD if begins_inside and word == own[0] else word for word in words]
        before = own


def with_spaces(rust: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a space before each word, where its pieces show spaces (GPT-2, RoBERTa)."""
    settings = json.loads(rust.to_str())
    if _add_prefix_spaces(settings.get("pre_tokenizer")):
        changed = Tokenizer.from_str(json.dumps(settings))
        changed.encode_special_tokens = rust.encode_special_tokens
        return changed
    return rust


def _add_prefix_spaces(part: Any) -> bool:
    """Set add_prefix_space in a pre-tokenizer's settings; return whether that changed any."""
    if isinstance(part, list):
        return max(map(_add_prefix_spaces, part), default=False)
    if not isinstance(part, dict):
        return False
    changed = part.get("type") == "ByteLevel" and part.get("add_prefix_space") is False
    if changed:
        part["add_prefix_space"] = True
    return max([changed, *map(_add_prefix_spaces, part.values())])
