"""What methods keep about a model, to undo what they did: one attribute, `whet`, with an entry for each method."""

from __future__ import annotations

from typing import Any

from torch import nn

_NAME = "whet"
PREPARED_BY = "prepared by"
"""The entry with the mark of the `whet.Accelerator` that has prepared the model, until something else changes it."""


def keep(module: nn.Module, method: str, state: Any) -> None:
    """Keep the method's state with the module. Copies of the module have a copy of it."""
    module.__dict__.setdefault(_NAME, {})[method] = state


def names(module: nn.Module) -> set[str]:
    """Return the methods that keep a state with the module."""
    return set(module.__dict__.get(_NAME, {}))


def read(module: nn.Module, method: str) -> Any:
    """Return the method's state; None if it keeps none."""
    return module.__dict__.get(_NAME, {}).get(method)


def take(module: nn.Module, method: str) -> Any:
    """Remove the method's state and return it; None if it keeps none."""
    states = module.__dict__.get(_NAME, {})
    state = states.pop(method, None)
    if not states:
        module.__dict__.pop(_NAME, None)
    return state
