"""Selection of the columns that the model gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from whet.log import logger

_RENAMED = ("label", "label_ids")
"""Columns that transformers' collators rename to `labels`."""


class Columns:
    """Removes other columns from rows; the log names them once."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._told: set[str] = set()

    def of(self, row: Any) -> Any:
        """Return the row without the other columns; a row that is not a mapping is returned unchanged."""
        if not isinstance(row, Mapping):
            return row
        left_out = row.keys() - self.names
        if left_out - self._told:
            self._told |= left_out
            logger.info("columns left out, because the model does not read them: %s", ", ".join(sorted(left_out)))
        return {name: value for name, value in row.items() if name in self.names} if left_out else row


class Row(dict[str, Any]):
    """A row that lists the model's columns; other columns can still be read by name."""

    def __init__(self, row: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
        super().__init__(shown)
        self._all = row

    def __missing__(self, name: str) -> Any:
        return self._all[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return any column of the row."""
        return self[name] if name in self or name in self._all else default

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a column and return it, also one that is not listed."""
        if name in self or name not in self._all:
            return super().pop(name, *default)
        return self._all[name]


def read_by(model: nn.Module) -> frozenset[str] | None:
    """Return the names of the columns that the model's forward takes; None if it takes any.

    The `**kwargs` of transformers' models do not take columns; transformers' Trainer ignores them too.
    """
    base: Any = getattr(model, "get_base_model", None)
    inside: nn.Module = model if base is None else base()  # the forward of an adapter's wrapper takes any argument
    parameters = inspect.signature(inside.forward).parameters.values()
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    if takes_any and not isinstance(inside, PreTrainedModel):
        return None
    return frozenset(parameter.name for parameter in parameters) | set(_RENAMED)
