"""How rows become padded batches: by the user's collator, or by the tokenizer where nobody says how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, default_data_collator

from whet.data.columns import Columns, Row, read_by
from whet.errors import ConfigError, DataError
from whet.models.bad_batch import checked
from whet.models.wrapped import unwrapped
from whet.objectives.base import Collate


def default_collator(processing_class: Any, model: nn.Module | None = None) -> Collate:
    """Return the tokenizer's way of padding, or plain stacking where there is none.

    With a model only the columns that it reads take part.
    """
    padded = hasattr(processing_class, "pad")
    collate: Collate = DataCollatorWithPadding(processing_class) if padded else _stacked
    return collate if model is None else without_unread(collate, model)


def without_unread(collate: Collate, model: nn.Module, label_names: Iterable[str] = ()) -> Collate:
    """Return the collator for rows from which the columns were taken that the model does not read.

    As transformers' Trainer does it with remove_unused_columns: text may stay in a data set. A collator that asks for
    such a column by name still gets it.
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
    """Return whether a collator does no more than to pad rows with a tokenizer: batches may do without."""
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
    """Return the rows below each other; raises DataError where they are not of one length."""
    try:
        return default_data_collator(rows)
    except ValueError as error:
        if "str" in str(error):  # a column of text, which `bad_batch.checked` names
            raise
        raise DataError(
            what="the rows of a batch cannot be stacked",
            got=str(error),
            why="they are of different lengths, and nobody said how this model's rows are padded",
            fix="pass the tokenizer as processing_class, or a data_collator of your own",
        ) from error
