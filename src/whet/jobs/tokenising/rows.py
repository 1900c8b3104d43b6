"""Texts and pairs of texts as the rows that a model reads: special tokens, truncation or windows; no padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.hardware import memory
from whet.jobs.tokenising import progress
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import (
    check_max_length,
    each,
    encode_texts,
    require_memory,
    rust_tokenizer,
    text_batches,
)
from whet.models.loading.tokenizer_check import rust_errors

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_SHORTER_TEXTS = "cut the text into several rows, or leave the row out"
_LAYOUT = 2
"""Raise this when the same input shall give other rows, or the file looks different."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How texts become rows."""

    max_seq_length: int = 128
    doc_stride: int | None = None
    """Tokens that two windows of a text share; None: what does not fit is cut."""


@dataclass(frozen=True)
class TextRows:
    """One row a text, or several windows of it, in the order of the texts."""

    rows: RowStore
    text_of: np.ndarray
    """(rows,) int64: the text that each row is a part of."""
    n_cut: int
    """Texts that were longer than max_seq_length."""


@dataclass(frozen=True)
class RowMaker:
    """What makes the rows of a run, and where they are kept."""

    tokenizer: Any
    options: RowOptions
    cache: Cache
    n_threads: int | None = None

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None) -> TextRows:
        """Return the rows of these texts: from the cache if it has them, else from `make_rows`."""
        key = Key(_LAYOUT, self.tokenizer, asdict(self.options))
        key.add_texts(texts)
        key.add_texts(pairs or [])

        def made() -> Mapping[str, np.ndarray]:
            rows = make_rows(texts, pairs, self.tokenizer, self.options, n_threads=self.n_threads)
            return rows.rows.arrays() | {"text_of": rows.text_of, "n_cut": np.asarray([rows.n_cut])}

        arrays = self.cache.take(key.hex(), made)
        return TextRows(RowStore.from_arrays(arrays), arrays["text_of"], int(arrays["n_cut"][0]))


def truncation(options: RowOptions, tokenizer: PreTrainedTokenizerBase, *, pairs: bool) -> dict[str, Any]:
    """Return how texts, or pairs of them, are cut, as arguments of `tokenizers.Tokenizer.enable_truncation`."""
    return {
        "max_length": options.max_seq_length,
        "stride": options.doc_stride or 0,
        "strategy": "only_second" if options.doc_stride is not None and pairs else "longest_first",
        "direction": tokenizer.truncation_side,
    }


def make_rows(
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    *,
    n_threads: int | None = None,
) -> TextRows:
    """Return the rows that the tokenizer makes of each text, or of each text and its pair, with truncation.

    Of a pair the longer text is cut, with windows the second one. Raises ConfigError for lengths that cannot work.
    """
    check_max_length(options.max_seq_length, tokenizer)
    rust = rust_tokenizer(tokenizer)
    _check_room(rust, texts, pairs, options)
    rust.enable_truncation(**truncation(options, tokenizer, pairs=pairs is not None))
    whole = texts if pairs is None else [first + second for first, second in zip(texts, pairs, strict=True)]
    require_memory(whole, memory.available_bytes(), fix=_SHORTER_TEXTS)
    batches = _batches(texts, pairs)
    with_windows = options.doc_stride is not None

    def encode(batch: list[Any]) -> _Part:
        part = _encoded(rust, batch, with_windows=with_windows)
        count(sum(len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in batch))
        return part

    with progress.reported(sum(map(len, whole))) as count:
        parts = each(batches, encode, n_threads)
    return _joined(parts, with_types="token_type_ids" in tokenizer.model_input_names)


def _check_room(rust: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, options: RowOptions) -> None:
    """Raise ConfigError if special tokens, or the first text of a pair, leave no room for windows to move on."""
    n_special = rust.num_special_tokens_to_add(pairs is not None)
    room, needed = options.max_seq_length - n_special, 1 if pairs is None else 2
    shared = options.doc_stride or 0
    if pairs is not None and options.doc_stride is not None:
        require_memory(texts, memory.available_bytes(), fix=_SHORTER_TEXTS)
        lengths = encode_texts(rust, texts).lengths
        longest = int(lengths.argmax())
        room, needed = room - int(lengths[longest]), 1
        n_special += int(lengths[longest])
        first = f" and the longest first text (example {longest + 1})"
    else:
        first = ""
    if room >= needed and room > shared:
        return
    least = n_special + max(needed, shared + 1)
    raise ConfigError(
        what="max_seq_length leaves too little room for text",
        got=f"max_seq_length {options.max_seq_length}; special tokens{first} take {n_special}"
        + (f", and windows share {shared}" if shared else ""),
        why="each row holds a token of the text that the row before it does not hold",
        fix=f"use --max_seq_length {least} or more" + (", or a smaller --doc_stride" if shared else ""),
    )


@dataclass(frozen=True)
class _Part:
    ids: np.ndarray
    types: np.ndarray
    lengths: np.ndarray
    n_windows: np.ndarray
    """(texts,): rows of each text."""
    n_cut: int


def _batches(texts: Sequence[str], pairs: Sequence[str] | None) -> list[list[Any]]:
    batches, begin = [], 0
    for batch in text_batches(texts):
        end = begin + len(batch)
        batches.append(list(zip(batch, pairs[begin:end], strict=True)) if pairs is not None else batch)
        begin = end
    return batches


def _encoded(rust: Tokenizer, batch: list[Any], *, with_windows: bool) -> _Part:
    shown = str(batch[0])[:60] if batch else ""
    with rust_errors(f"a text among these: {shown!r} ..."):
        # the fast one gives later windows of a pair the token type of the first text everywhere (tokenizers 0.23)
        encodings = rust.encode_batch(batch) if with_windows else rust.encode_batch_fast(batch)
    n_cut = sum(bool(encoding.overflowing) for encoding in encodings)
    windows = [[one, *one.overflowing] if with_windows else [one] for one in encodings]
    flat: list[Encoding] = list(chain.from_iterable(windows))
    lengths = np.fromiter((len(one.ids) for one in flat), np.int64, len(flat))
    total = int(lengths.sum())
    return _Part(
        ids=np.fromiter(chain.from_iterable(one.ids for one in flat), np.int32, total),
        types=np.fromiter(chain.from_iterable(one.type_ids for one in flat), np.uint8, total),
        lengths=lengths,
        n_windows=np.fromiter(map(len, windows), np.int64, len(windows)),
        n_cut=n_cut,
    )


def _joined(parts: Sequence[_Part], *, with_types: bool) -> TextRows:
    lengths = np.concatenate([part.lengths for part in parts])
    n_windows = np.concatenate([part.n_windows for part in parts])
    tokens = {"input_ids": np.concatenate([part.ids for part in parts])}
    if with_types:
        tokens["token_type_ids"] = np.concatenate([part.types for part in parts])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TextRows(
        rows=RowStore(cu_seqlens=starts, tokens=tokens),
        text_of=np.repeat(np.arange(len(n_windows)), n_windows),
        n_cut=sum(part.n_cut for part in parts),
    )
