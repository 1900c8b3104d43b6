"""How rows are padded where nobody says how."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, default_data_collator

from whet.data.columns import Columns, read_by
from whet.models.objective import Collate


def default_collator(processing_class: Any, model: nn.Module | None = None) -> Collate:
    """Return the tokenizer's way of padding, or plain stacking where there is none.

    With a model only the columns that it reads take part.
    """
    padded = hasattr(processing_class, "pad")
    collate: Collate = DataCollatorWithPadding(processing_class) if padded else default_data_collator
    names = None if model is None else read_by(model)
    if names is None:
        return collate
    columns = Columns(names)

    def collate_what_is_read(rows: list[Any]) -> Mapping[str, Any]:
        return collate([columns.of(row) for row in rows])

    return collate_what_is_read
