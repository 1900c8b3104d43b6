"""Which data sets have rows with an index."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import IterableDataset


def is_sized(dataset: Any) -> bool:
    """Return whether the rows of a data set have an index; other data sets are read in their own order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    try:
        return isinstance(dataset, Sized) and len(dataset) >= 0
    except (TypeError, NotImplementedError):
        return False


def is_empty(dataset: Any) -> bool:
    """Return whether there are no rows; an iterable counts as not empty, as its length is unknown."""
    return dataset is None or (is_sized(dataset) and len(dataset) == 0)
