"""The rows that a proof runs: of many lengths, one beyond every window and bucket, with special tokens in them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.padding import Padding
from whet.data.store import RowStore
from whet.models.fused.decoder import named_settings

MOST_TOKENS = 2_100
"""The longest row that a proof runs, and the most tokens of rows beyond the position table."""
CHANGED = 2
"""The row that is changed to see whether others move; what fills up a packed batch copies tokens of row 0."""
_REACH = re.compile(r"window|bucket|distance|relative_pos|sliding|local|chunk|block_size|span|stride")
_SPECIAL = re.compile(r"(bos|eos|cls|sep|mask|unk)_token_id$")


@dataclass(frozen=True)
class ProofRows:
    """Rows end to end, and the same rows padded."""

    store: RowStore
    padding: Padding

    def padded(self, *, all_columns: bool = True) -> dict[str, Tensor]:
        """Return the columns (B, T) of a padded call, with a mask."""
        real = self.real()
        names = list(self.store.tokens) if all_columns else ["input_ids"]
        made = {name: torch.full(real.shape, self.padding.fill(name)) for name in names}
        for name, column in made.items():
            column[real] = torch.from_numpy(self.store.tokens[name])
        return made | {"attention_mask": real.long()}

    def real(self) -> Tensor:
        """Return which places (B, T) of the padded batch are tokens."""
        lengths = torch.from_numpy(self.store.lengths)
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def changed(self) -> ProofRows:
        """Return the same rows with other tokens in one of them."""
        ids = self.store.tokens["input_ids"].copy()
        own = slice(self.store.cu_seqlens[CHANGED], self.store.cu_seqlens[CHANGED + 1])
        ids[own] = np.roll(ids[own], 1)
        ids[own][0] = ids[own].max() - 1
        return replace(self, store=replace(self.store, tokens=dict(self.store.tokens) | {"input_ids": ids}))

    def unchanged_tokens(self) -> Tensor:
        """Return which packed tokens (N,) belong to other rows than the changed one."""
        rows = np.repeat(np.arange(len(self.store)), self.store.lengths)
        return torch.from_numpy(rows != CHANGED)


def reach(config: Any) -> int:
    """Return the largest window, bucket or distance that the configuration names; 0 if it names none."""
    found = [
        int(value)
        for name, value in named_settings(config.to_dict())
        if _REACH.search(name) and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return max([0, *found])


def longest_row(config: Any) -> int:
    """Return how long a row has to be to reach beyond everything local, as far as the model has positions."""
    longest = max(40, reach(config) + 17)
    table = getattr(config, "max_position_embeddings", None)
    return min(longest, table - 4) if isinstance(table, int) and table > 8 and not _has_rotary(config) else longest


def proof_rows(encoder: Any, seed: int = 0) -> ProofRows:
    """Return rows of different lengths, one as long as `longest_row`, with each column that the encoder can read."""
    longest = longest_row(encoder.config)
    return _rows(encoder, [5, min(23, longest), 7, longest, 1, 2, min(33, longest)], seed)


def wide_rows(encoder: Any, seed: int = 0) -> ProofRows:
    """Return short rows that are together longer than the position table, as batches of training are."""
    table = getattr(encoder.config, "max_position_embeddings", None) or 0
    n_rows = min(max(table, 64), MOST_TOKENS) // 24 + 2
    return _rows(encoder, [24 if row % 3 else 11 for row in range(n_rows)], seed)


def _rows(encoder: Any, lengths: list[int], seed: int) -> ProofRows:
    numbers, config = np.random.default_rng(seed), encoder.config
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    pad = getattr(config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    ids = numbers.integers(0, encoder.get_input_embeddings().num_embeddings, starts[-1])
    ids[ids == pad] = (pad + 1) % encoder.get_input_embeddings().num_embeddings
    for place, special in enumerate(_special_ids(config, pad)):
        ids[starts[:-1] + place % np.asarray(lengths)] = special
    tokens = {"input_ids": ids}
    n_types = getattr(config, "type_vocab_size", 0) or 0
    if "token_type_ids" in inspect.signature(type(encoder).forward).parameters and n_types > 1:
        tokens["token_type_ids"] = numbers.integers(0, n_types, starts[-1])
    return ProofRows(RowStore(starts, tokens), Padding("all", token_id=pad))


def _special_ids(config: Any, pad: int) -> list[int]:
    found = {value for name, value in config.to_dict().items() if _SPECIAL.search(name) and isinstance(value, int)}
    return sorted(value for value in found if 0 <= value < (getattr(config, "vocab_size", 0) or 0) and value != pad)


def _has_rotary(config: Any) -> bool:
    return any("rope" in name or "rotary" in name for name, _ in named_settings(config.to_dict()))
