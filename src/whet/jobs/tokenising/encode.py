"""Texts to tokens, end to end in flat arrays, through the Rust tokenizer and without its special tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from whet.errors import ConfigError, DataError
from whet.hardware import memory
from whet.jobs.tokenising import progress
from whet.models.loading.load import max_positions
from whet.models.loading.tokenizer_check import rust_errors

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

Batch = TypeVar("Batch")
Encoded = TypeVar("Encoded")
_BATCH = 512
"""Texts handed over at once: enough for all threads, and few enough that their encodings take little memory."""
_BATCH_CHARS = 1 << 22
"""Characters handed over at once, for the same reason."""
_BYTES_PER_CHAR = 320
"""Memory that encodings take for a character: measured with WordPiece on text of punctuation alone."""
_LONGEST_UNSAID = 10_000
"""Lengths that tokenizers give if they know no limit are above it."""
_USUAL_LENGTH = 512
"""Tokens of the longest row, if neither the tokenizer nor the model has a limit."""


@dataclass(frozen=True)
class EncodedTexts:
    """The tokens of many texts, end to end."""

    ids: np.ndarray
    """(tokens,) int32."""
    starts: np.ndarray
    """(texts + 1,) int64: where each text's tokens begin."""
    spans: np.ndarray
    """(tokens, 2) int64: first character of each token and one past its last; (0, 2) where not asked for."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, (texts,) int64."""
        return np.diff(self.starts)


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of the tokenizer's Rust part that neither truncates nor pads; the tokenizer is left as it is."""
    from tokenizers import Tokenizer

    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            what="the tokenizer is a slow one",
            got=type(tokenizer).__name__,
            why="only tokenizers of the `tokenizers` library report where in the context each token stands",
            fix="name a model with a tokenizer.json; commands that train also take the tokenizer of another one in "
            "--tokenizer_name",
        )
    copy = Tokenizer.from_str(cast(Tokenizer, tokenizer.backend_tokenizer).to_str())
    copy.no_truncation()
    copy.no_padding()
    # a setting that tokenizer.json does not hold: whether "[SEP]" in a text is read letter by letter
    copy.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return copy


def encode_texts(
    rust: Tokenizer, texts: Sequence[str], *, with_spans: bool = False, n_threads: int | None = None
) -> EncodedTexts:
    """Return the tokens of these texts, each tokenised once and without special tokens; `n_threads` as in `each`."""
    require_memory(texts, memory.available_bytes())

    def encode(batch: Sequence[str]) -> EncodedTexts:
        made = tokenised(batch)
        count(sum(map(len, batch)))
        return made

    def tokenised(batch: Sequence[str]) -> EncodedTexts:
        with rust_errors(f"a text among these: {batch[0][:60]!r} ..." if batch else "no text"):
            if with_spans:
                return _flat(rust.encode_batch(batch, add_special_tokens=False), with_spans=True)
            return _flat(rust.encode_batch_fast(batch, add_special_tokens=False), with_spans=False)

    with progress.reported(sum(map(len, texts))) as count:
        return _joined(each(text_batches(texts), encode, n_threads))


def each(batches: Iterable[Batch], encode: Callable[[Batch], Encoded], n_threads: int | None) -> list[Encoded]:
    """Return what `encode` makes of each batch, in their order.

    None leaves the threads to the Rust library: all cores of this process, or one with TOKENIZERS_PARALLELISM=false.
    A number means just so many threads. The tokens do not depend on it.
    """
    if n_threads is None:
        return [encode(batch) for batch in batches]
    with _threads_outside(), ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(encode, batches))


def check_max_length(
    max_seq_length: int,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None = None,
    *,
    flag: str = "max_seq_length",
) -> None:
    """Raise ConfigError if rows would be longer than the tokenizer, or the positions of a model, allow."""
    limits = {"tokenizer takes": tokenizer.model_max_length, "model has positions for": positions}
    for words, limit in limits.items():
        if limit is not None and max_seq_length > limit:
            raise ConfigError(
                what=f"rows of {max_seq_length} tokens are longer than the {words}",
                got=f"{flag} {max_seq_length}, limit {limit}",
                why="the model has learnt no positions behind the limit",
                fix=f"--{flag} {limit} or less",
            )


def row_length(
    asked: int | None,
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    *,
    most: int | None = None,
    flag: str = "max_seq_length",
) -> int:
    """Return the longest row in tokens: what was asked for, else what the tokenizer and the model allow, or `most`."""
    limits = [tokenizer.model_max_length, max_positions(model), most]
    length = asked or min((one for one in limits if one and one < _LONGEST_UNSAID), default=_USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model), flag=flag)
    return length


def text_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in order, so many at a time that their encodings take little memory; at least one batch."""
    batch: list[str] = []
    n_chars = 0
    for text in texts:
        if batch and (len(batch) == _BATCH or n_chars + len(text) > _BATCH_CHARS):
            yield batch
            batch, n_chars = [], 0
        batch.append(text)
        n_chars += len(text)
    yield batch


_SHORTER_CONTEXTS = "cut the text into several contexts, each with its own questions"


def require_memory(texts: Sequence[str], available_bytes: int | None, *, fix: str = _SHORTER_CONTEXTS) -> None:
    """Raise DataError for a text whose encoding would not fit into memory."""
    longest = max(texts, key=len, default="")
    if available_bytes is None or len(longest) * _BYTES_PER_CHAR <= available_bytes:
        return
    raise DataError(
        what="a text is too long to be tokenised in this machine's memory",
        got=f"{len(longest):,} characters, which begin with {longest[:60]!r}",
        why=f"the tokens of one text take up to {_BYTES_PER_CHAR} bytes a character, and {available_bytes:,} are free",
        fix=fix,
    )


@contextmanager
def _threads_outside() -> Iterator[None]:
    """Have each call tokenise in its own thread: the size of Rust's pool cannot be changed in a running process."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _flat(encodings: Sequence[Encoding], *, with_spans: bool) -> EncodedTexts:
    ids = [encoding.ids for encoding in encodings]
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    n_tokens = int(lengths.sum())
    n_spans = n_tokens if with_spans else 0
    pairs = chain.from_iterable(encoding.offsets for encoding in encodings if with_spans)
    return EncodedTexts(
        ids=np.fromiter(chain.from_iterable(ids), np.int32, n_tokens),
        starts=_starts(lengths),
        spans=np.fromiter(chain.from_iterable(pairs), np.int64, 2 * n_spans).reshape(n_spans, 2),
    )


def _joined(parts: Sequence[EncodedTexts]) -> EncodedTexts:
    return EncodedTexts(
        ids=np.concatenate([part.ids for part in parts]),
        starts=_starts(np.concatenate([part.lengths for part in parts])),
        spans=np.concatenate([part.spans for part in parts]),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
