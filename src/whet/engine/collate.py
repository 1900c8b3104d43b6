"""Makes padded batches of rows: with the user's collator, or with the tokenizer by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, default_data_collator

from whet.data.columns import Columns, Row, read_by
from whet.errors import ConfigError, DataError
from whet.models.adapters import unwrapped
from whet.models.packed import checked
from whet.objectives.base import Collate


def default_collator(processing_class: Any, model: nn.Module | None = None) -> Collate:
    """Return a collator that pads with the tokenizer, or stacks rows if there is none.

    With a model it takes only the columns that the model reads.
    """
    padded = hasattr(processing_class, "pad")
    collate: Collate = DataCollatorWithPadding(processing_class) if padded else _stacked
    return collate if model is None else without_unread(collate, model)


def without_unread(collate: Collate, model: nn.Module, label_names: Iterable[str] = ()) -> Collate:
    """Return a collator that removes the columns which the model does not read.

    This is what remove_unused_columns does in transformers' Trainer: text may stay in a data set. A collator that asks
    for such a column by name still gets it.
    """
    names = read_by(unwrapped(model))
    if names is None:
        return collate
    collate = checked(collate, model)
    columns = Columns(names | set(label_names))

    def shown(row: Any) -> Any:
        read = columns.of(row)
        return read if read is row else Row(row, read)

    def collate_what_is_read(rows: list[Any]) -> Mapping[str, Any]:
        return _as_mapping(collate([shown(row) for row in rows]))

    return collate_what_is_read


def pads_only(collate: Any) -> bool:
    """Return whether a collator only pads rows with a tokenizer: then batches can do without padding."""
    return type(collate) is DataCollatorWithPadding


def _as_mapping(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise ConfigError(
        what="the data_collator returned no batch",
        got=type(batch).__name__,
        why="a model is called with a batch's columns by name",
        fix="return a dict of tensors from the data_collator",
    )


def _stacked(rows: list[Any]) -> Mapping[str, Any]:
    """Return the rows below each other; raises DataError if their lengths differ."""
    try:
        return default_data_collator(rows)
    except ValueError as error:
        if "str" in str(error):  # a column of text, which `packed.checked` names
            raise
        raise DataError(
            what="the rows of a batch cannot be stacked",
            got=str(error),
            why="they have different lengths, and no tokenizer or data_collator pads them",
            fix="pass the tokenizer as processing_class, or a data_collator of your own",
        ) from error
