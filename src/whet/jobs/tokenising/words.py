"""Sentences that come as words, as the rows that a model reads; each token knows its word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.jobs.tokenising import progress
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import check_max_length, rust_tokenizer
from whet.models.loading.tokenizer_check import rust_errors

_LAYOUT = 1
"""Raise this when the same input shall give other rows, or the file looks different."""
_SENTENCES = 512
NO_WORD = -1


@dataclass(frozen=True)
class WordRows:
    """One row a sentence."""

    rows: RowStore
    word_of: np.ndarray
    """(tokens,) int64: the word of the sentence that each token is a piece of; -1 for special tokens."""

    @property
    def is_first(self) -> np.ndarray:
        """Whether each token is the first piece of a word, (tokens,) bool."""
        same = np.diff(self.word_of, prepend=NO_WORD - 1) == 0
        same[self.rows.cu_seqlens[:-1]] = False
        return (self.word_of != NO_WORD) & ~same

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

    def rows(self, sentences: Sequence[Sequence[str]]) -> WordRows:
        """Return the rows of these sentences: from the cache if it has them."""
        key = Key(_LAYOUT, self.tokenizer, {"words": True, "max_seq_length": self.max_seq_length})
        key.add_numbers([len(words) for words in sentences])
        key.add_texts(list(chain.from_iterable(sentences)))
        arrays = self.cache.take(key.hex(), lambda: self._make(sentences))
        return WordRows(RowStore.from_arrays(arrays), arrays["word_of"])

    def _make(self, sentences: Sequence[Sequence[str]]) -> Mapping[str, np.ndarray]:
        check_max_length(self.max_seq_length, self.tokenizer)
        rust = _for_words(rust_tokenizer(self.tokenizer))
        if (n_special := rust.num_special_tokens_to_add(False)) >= self.max_seq_length:
            raise ConfigError(
                what="max_seq_length leaves no room for words",
                got=f"max_seq_length {self.max_seq_length}; special tokens take {n_special}",
                why="a row holds a word",
                fix=f"use --max_seq_length {n_special + 1} or more",
            )
        rust.enable_truncation(self.max_seq_length, direction=self.tokenizer.truncation_side)
        ids, types, words, lengths = [], [], [], []
        with progress.reported(sum(len(word) for sentence in sentences for word in sentence)) as count:
            for begin in range(0, len(sentences), _SENTENCES):
                batch = [list(one) for one in sentences[begin : begin + _SENTENCES]]
                with rust_errors(f"a sentence among these: {' '.join(batch[0])[:60]!r} ..."):
                    encodings = rust.encode_batch(batch, is_pretokenized=True)
                for one in encodings:
                    ids += one.ids
                    types += one.type_ids
                    words += [NO_WORD if word is None else word for word in one.word_ids]
                    lengths.append(len(one.ids))
                count(sum(len(word) for sentence in batch for word in sentence))
        tokens: dict[str, np.ndarray] = {"input_ids": np.asarray(ids, dtype=np.int32)}
        if "token_type_ids" in self.tokenizer.model_input_names:
            tokens["token_type_ids"] = np.asarray(types, dtype=np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return RowStore(starts, tokens).arrays() | {"word_of": np.asarray(words, dtype=np.int64)}


def _for_words(rust: Tokenizer) -> Tokenizer:
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
