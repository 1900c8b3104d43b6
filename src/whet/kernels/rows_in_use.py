"""Tracks the vocabulary rows with a gradient: gradients and moments of other rows are zero and need not be read.

A vocabulary is large, and the texts of a fine-tuning use a small part of it: XQuAD uses 20 % of BERT's vocabulary, and
one language uses far less of XLM-R's. AdamW without decay does not change a row that never had a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

_ATTRIBUTE = "whet_rows_in_use"


class RowsInUse:
    """The rows of a table (entries, D) whose gradient may be nonzero, now or in any earlier step.

    The record is an attribute of the gradient tensor. A tensor that replaces it has no record, and any write to the
    tensor, also by autograd, invalidates it.
    """

    def __init__(self, table: Tensor) -> None:
        self.bytes = torch.zeros(table.shape[0], dtype=torch.uint8)
        """(entries,): 1 for a row in use. Rows are only added."""
        self.width = table.shape[1]

    def include(self, rows: Tensor) -> None:
        """Add rows, by number (any,) int64 or by a mask (entries,) bool."""
        self.bytes[rows] = 1

    def part(self, first: int, n: int) -> RowsInUse:
        """Return the record of n rows from `first` on; it shares the memory of this one."""
        found = copy(self)
        found.bytes = self.bytes[first : first + n]
        return found

    def put_on(self, gradient: Tensor) -> None:
        """Record on this tensor, the table's gradient, that it is zero in all other rows now."""
        setattr(gradient, _ATTRIBUTE, (self, gradient._version))


def rows_in_use(gradient: Tensor) -> RowsInUse | None:
    """Return the record of this gradient; None: every row may be nonzero."""
    return rows_in_use_of([gradient])[0]


def rows_in_use_of(gradients: Sequence[Tensor]) -> list[RowsInUse | None]:
    """Return the record of each of these gradients; None: every row of it may be nonzero."""
    records = [(one, getattr(one, _ATTRIBUTE, None)) for one in gradients]
    return [known[0] if known is not None and one._version == known[1] else None for one, known in records]


def forget_rows(gradient: Tensor) -> None:
    """Remove the record: every row of the gradient may be nonzero."""
    setattr(gradient, _ATTRIBUTE, None)
