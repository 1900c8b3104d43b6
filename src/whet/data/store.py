"""Rows of tokens, stored end to end in flat arrays: the form of a data set's windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from whet.system import follow_umask

_COLUMN_PREFIX = "token."
_ROW_PREFIX = "row."
_STARTS = "row_starts"
"""Name of `cu_seqlens` in files and fingerprints, kept for existing caches and checkpoints."""


@dataclass(frozen=True)
class RowStore:
    """A data set of token rows without padding; also a map-style dataset for any Trainer.

    `tokens` has an array (N,) per token column (`input_ids`, `token_type_ids` ...), `cu_seqlens` is (rows + 1,) int64,
    and `labels` has an array per label column (`start_positions` ...): (rows,) or (rows, labels), int64 or float32.
    """

    cu_seqlens: np.ndarray
    tokens: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    given_lengths: np.ndarray | None = None
    """Lengths of the rows (rows,) with the padding of the data set; None: it had no padding."""

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, row: int) -> dict[str, object]:
        """Return the row as a data set of transformers holds it: lists of ints, and labels as numbers or lists."""
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        span = slice(self.cu_seqlens[row], self.cu_seqlens[row + 1])
        tokens: dict[str, object] = {name: column[span].tolist() for name, column in self.tokens.items()}
        return tokens | {name: column[row].tolist() for name, column in self.labels.items()}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, (rows,) int64."""
        return np.diff(self.cu_seqlens)

    @property
    def lengths_with_padding(self) -> np.ndarray:
        """Tokens of each row, including the padding of the data set, (rows,) int64."""
        return self.lengths if self.given_lengths is None else self.given_lengths

    def take(self, rows: Sequence[int] | np.ndarray) -> RowStore:
        """Return these rows, in this order, as a new store."""
        index = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[index]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        where = np.arange(starts[-1]) + np.repeat(self.cu_seqlens[index] - starts[:-1], lengths)
        return RowStore(
            cu_seqlens=starts,
            tokens={name: column[where] for name, column in self.tokens.items()},
            labels={name: column[index] for name, column in self.labels.items()},
            given_lengths=None if self.given_lengths is None else self.given_lengths[index],
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything as named arrays, the form of a store in a safetensors file."""
        return (
            {_STARTS: self.cu_seqlens}
            | {_COLUMN_PREFIX + name: column for name, column in self.tokens.items()}
            | {_ROW_PREFIX + name: column for name, column in self.labels.items()}
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The inverse of `arrays`; other names are ignored."""
        return cls(
            cu_seqlens=arrays[_STARTS],
            tokens=_named(arrays, _COLUMN_PREFIX),
            labels=_named(arrays, _ROW_PREFIX),
        )

    def save(self, path: Path) -> None:
        """Write the store as one safetensors file."""
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(array) for name, array in self.arrays().items()}, str(path))
        follow_umask(path)

    @classmethod
    def load(cls, path: Path) -> RowStore:
        """Read a store written by `save`."""
        from safetensors.numpy import load_file

        return cls.from_arrays(load_file(str(path)))


def _named(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
