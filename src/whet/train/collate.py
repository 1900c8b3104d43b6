"""How rows are padded where nobody says how."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, default_data_collator

from whet.data.columns import Columns, read_by
from whet.errors import DataError
from whet.models.objective import Collate


def default_collator(processing_class: Any, model: nn.Module | None = None) -> Collate:
    """Return the tokenizer's way of padding, or plain stacking where there is none.

    With a model only the columns that it reads take part.
    """
    padded = hasattr(processing_class, "pad")
    collate: Collate = DataCollatorWithPadding(processing_class) if padded else _stacked
    names = None if model is None else read_by(model)
    if names is None:
        return collate
    columns = Columns(names)

    def collate_what_is_read(rows: list[Any]) -> Mapping[str, Any]:
        return collate([columns.of(row) for row in rows])

    return collate_what_is_read


def _stacked(rows: list[Any]) -> Mapping[str, Any]:
    """Return the rows below each other; raises DataError where they are not of one length."""
    try:
        return default_data_collator(rows)
    except ValueError as error:
        raise DataError(
            what="the rows of a batch cannot be stacked",
            got=str(error),
            why="they are of different lengths, and nobody said how this model's rows are padded",
            fix="pass the tokenizer as processing_class, or a data_collator of your own",
        ) from error
