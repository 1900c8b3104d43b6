"""Texts as rows of tokens with labels: -100 for what is not learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from whet.console import plural
from whet.data.store import RowStore
from whet.errors import DataError
from whet.hardware import memory
from whet.jobs.tokenising import progress
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import require_memory, rust_tokenizer, text_batches
from whet.log import logger
from whet.models.loading.tokenizer_check import rust_errors
from whet.objectives.base import IGNORED
from whet.tasks.lm.examples import Examples
from whet.tasks.lm.messages import Spans
from whet.tasks.lm.render import Rendered, rendered

_LAYOUT = 2
"""Raise this when the same input shall give other rows, or the file looks different."""

_Row = tuple[np.ndarray, np.ndarray]
"""Ids and labels."""
_SHORTER_TEXTS = 'write it as rows of a JSON lines file, a document each: {"text": "..."}'


@dataclass(frozen=True)
class RowMaker:
    """What makes the rows of a run, and where they are kept."""

    tokenizer: Any
    max_length: int
    cache: Cache
    packing: bool | None = None
    completion_only: bool = True
    group: int = 1
    """How many rows stay together: if one of them has no token to learn, all of them are left out."""

    def rows(self, name: str, examples: Examples) -> RowStore:
        """Return the rows of the examples: from the cache if it has them. `name` is the split's, for the log."""
        blocks = examples.form == "lines" if self.packing is None else self.packing
        made = rendered(_as_one_text(examples, blocks), self.tokenizer, completion_only=self.completion_only)
        options = {"max_length": self.max_length, "blocks": blocks, "special": made.with_special, "end": made.with_end}
        options |= {} if self.group == 1 else {"group": self.group}
        key = Key(_LAYOUT, self.tokenizer, {"lm": True, "form": examples.form, **options})
        key.add_texts(made.texts)
        for span in made.spans:
            key.add_numbers([] if span is None else np.asarray(span).flatten())
        end = self._end()
        if end is None and made.with_end:
            logger.warning(
                "%s: the tokenizer has no eos_token, so the model does not learn where a text ends",
                name,
            )
        self._warn(name, made)
        key.add_numbers([-1 if end is None else end])
        arrays = self.cache.take(key.hex(), lambda: self._make(made, examples, blocks=blocks))
        found = RowStore.from_arrays(arrays)
        self._describe(name, found, dict(zip(("cut", "empty"), arrays["counts"].tolist(), strict=True)))
        if not len(found):
            raise _nothing_to_learn(name, examples, self.max_length)
        return found

    def _warn(self, name: str, made: Rendered) -> None:
        """Log what the chat template leaves out of the rows."""
        if made.endless:
            logger.warning(
                "%s: the chat template ends no turn of the assistant, so the model does not learn where an answer ends",
                name,
            )
        if made.not_shown:
            logger.warning(
                "%s: fields of messages that the chat template does not show: %s", name, ", ".join(made.not_shown)
            )

    def _end(self) -> int | None:
        return self.tokenizer.eos_token_id

    def _make(self, made: Rendered, examples: Examples, *, blocks: bool) -> Mapping[str, np.ndarray]:
        tokens = self._tokens(made)
        n_cut = 0
        if blocks:
            tokens = _cut(_joined(tokens), self.max_length)
        elif examples.form in ("lines", "text"):
            tokens = [part for one in tokens for part in _cut(one, self.max_length)]
        else:
            n_cut = sum(len(one[0]) > self.max_length for one in tokens)
            tokens = [(ids[: self.max_length], labels[: self.max_length]) for ids, labels in tokens]
        kept = [row for group in _groups(tokens, self.group) if all(map(_is_learnt, group)) for row in group]
        counts = np.asarray([n_cut, len(tokens) - len(kept)])
        return _store(kept).arrays() | {"counts": counts}

    def _tokens(self, made: Rendered) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and labels of each text."""
        rust, end, found = rust_tokenizer(self.tokenizer), self._end(), []
        require_memory(made.texts, memory.available_bytes(), fix=_SHORTER_TEXTS)
        spans = iter(made.spans)
        with progress.reported(sum(map(len, made.texts))) as count:
            for batch in text_batches(made.texts):
                with rust_errors(f"a text among these: {batch[0][:60]!r} ..."):
                    encodings = rust.encode_batch(batch, add_special_tokens=made.with_special)
                found += [_labelled(one, span) for one, span in zip(encodings, spans, strict=False)]
                count(sum(map(len, batch)))
        if end is not None and made.with_end:
            found = [_ended(ids, labels, end) for ids, labels in found]
        return found

    def _describe(self, name: str, rows: RowStore, counts: Mapping[str, int]) -> None:
        """Log what the split holds, and what of it is not learnt."""
        n_targets = int((rows.tokens["labels"] != IGNORED).sum()) if len(rows) else 0
        logger.info(
            "%s: %d rows of up to %d tokens, %d tokens, %d of them learnt",
            name, len(rows), self.max_length, int(rows.cu_seqlens[-1]), n_targets,
        )  # fmt: skip
        if counts["cut"]:
            logger.warning(
                "%s: %s longer than max_length %d, and cut", name, plural(counts["cut"], "row"), self.max_length
            )
        if counts["empty"]:
            logger.warning("%s: %s without a token to learn, left out", name, plural(counts["empty"], "row"))


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return rows below each other, padded on the right; padding is masked and has no label, so that any id will do."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for n, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[n, :length] = torch.as_tensor(row["input_ids"])
        labels[n, :length] = torch.as_tensor(row["labels"])
        mask[n, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _as_one_text(examples: Examples, blocks: bool) -> Examples:
    """Return the examples; plain text is one text in blocks, and else each line that is not blank is a text.

    A tokenizer reads the lines of a block together: it may begin a text in a way of its own, or join line ends.
    """
    if examples.form != "lines":
        return examples
    if blocks:
        return Examples(examples.source, "text", ["".join(examples.values)], examples.places[:1])
    kept = [(line.strip("\r\n"), place) for line, place in zip(examples.values, examples.places, strict=True)
            if not line.isspace()]  # fmt: skip
    return Examples(examples.source, "text", [line for line, _ in kept], [place for _, place in kept])


def _labelled(encoding: Encoding, spans: Spans | None) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels: a token is learnt if one of its characters is.

    Some tokenizers cut spaces off the offsets: a token of spaces alone then stands empty at its own end.
    """
    ids = np.asarray(encoding.ids, dtype=np.int32)
    if spans is None:
        return ids, ids.astype(np.int64)
    begin, end = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    learnt = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        empty_inside = (begin == end) & (end <= last)
        learnt |= (end > first) & (((begin < last) & (end > begin)) | empty_inside)
    return ids, np.where(learnt, ids, IGNORED)


def _ended(ids: np.ndarray, labels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row with the end-of-text token, which is learnt."""
    if len(ids) and ids[-1] == end:
        return ids, np.append(labels[:-1], end)
    return np.append(ids, np.int32(end)), np.append(labels, end)


def _groups(tokens: Sequence[_Row], size: int) -> Iterator[Sequence[_Row]]:
    return (tokens[first : first + size] for first in range(0, len(tokens), size))


def _is_learnt(row: _Row) -> bool:
    return bool((row[1][1:] != IGNORED).any())


def _joined(tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = zip(*tokens, strict=True)
    return np.concatenate(ids), np.concatenate(labels)


def _cut(tokens: tuple[np.ndarray, np.ndarray], length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    ids, labels = tokens
    return [(ids[first : first + length], labels[first : first + length]) for first in range(0, len(ids), length)]


def _store(tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> RowStore:
    lengths = [len(ids) for ids, _ in tokens]
    empty = np.empty(0, dtype=np.int64)
    return RowStore(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens={
            "input_ids": np.concatenate([ids for ids, _ in tokens] or [empty.astype(np.int32)]),
            "labels": np.concatenate([labels for _, labels in tokens] or [empty]),
        },
    )


def _nothing_to_learn(name: str, examples: Examples, max_length: int) -> DataError:
    return DataError(
        what=f"{examples.source}: no row has a token to learn",
        got=f"{len(examples)} examples, rows of up to {max_length} tokens",
        why=f"the loss of {name} is a mean over tokens that follow another one",
        fix="use longer texts, a larger --max_length if prompts fill it, or, without --loss dpo, "
        "--completion_only_loss false",
    )
