"""Which columns of a row reach the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from whet.log import logger

_RENAMED = ("label", "label_ids")
"""Columns that transformers' collators hand on as `labels`."""


class Columns:
    """Leaves out of rows what is not named; the log tells once what that was."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._told: set[str] = set()

    def of(self, row: Any) -> Any:
        """Return the row without the other columns; a row that is no mapping as it is."""
        if not isinstance(row, Mapping):
            return row
        left_out = row.keys() - self.names
        if left_out - self._told:
            self._told |= left_out
            logger.info("columns left out, as the model does not read them: %s", ", ".join(sorted(left_out)))
        return {name: value for name, value in row.items() if name in self.names} if left_out else row


def read_by(model: nn.Module) -> frozenset[str] | None:
    """Return the names of the columns that the model's forward takes; None where it takes any.

    The `**kwargs` of transformers' models are for other things than columns, as its own Trainer has it.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    if takes_any and not isinstance(model, PreTrainedModel):
        return None
    return frozenset(parameter.name for parameter in parameters) | set(_RENAMED)
