"""Which rows of an embedding table have had a gradient: those of all other rows are zero, and need not be read.

A vocabulary is large, and the texts of a fine-tuning use a small part of it: XQuAD 20 % of BERT's 30,522 entries, and
of XLM-R's 250,002 any one language far less. AdamW without decay leaves a row alone that never had a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ATTRIBUTE = "whet_rows_in_use"


class RowsInUse:
    """The rows of a table (entries, D) whose gradient may be other than zero, now or in any step before.

    The knowledge goes with the gradient tensor that it is put on: a gradient that somebody puts in its place has none,
    and it ends when anybody writes to the tensor, autograd included.
    """

    def __init__(self, table: Tensor) -> None:
        self.bytes = torch.zeros(table.shape[0], dtype=torch.uint8)
        """(entries,): 1 where in use. Only ever grows."""
        self.width = table.shape[1]

    def include(self, rows: Tensor) -> None:
        """Add rows, by number (any,) int64 or by a mask (entries,) bool."""
        self.bytes[rows] = 1

    def put_on(self, gradient: Tensor) -> None:
        """Say of this tensor, the table's gradient, that it is zero in all other rows, as it is now."""
        setattr(gradient, _ATTRIBUTE, (self, gradient._version))


def rows_in_use(gradient: Tensor) -> RowsInUse | None:
    """Return what is known of this gradient; None: it may be other than zero anywhere."""
    rows, version = getattr(gradient, _ATTRIBUTE, (None, 0))
    return rows if gradient._version == version else None


def forget_rows(gradient: Tensor) -> None:
    """Say that the gradient may be other than zero anywhere."""
    setattr(gradient, _ATTRIBUTE, (None, 0))
