"""Finds the methods of a Trainer that a subclass, an instance or a patch replaced, and refuses those never called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.train.compat.method_table import ALTERNATIVE, EARLIER, HONOURED_INTERNAL, INTERNAL, METHODS

_REFUSED = (
    frozenset({name for name, method in METHODS.items() if method.override == "refused"} | INTERNAL | EARLIER)
    - HONOURED_INTERNAL
)

LOSS = ("compute_loss", "training_step", "_prepare_inputs")
"""Methods that take a padded batch: if one is replaced, batches are padded for it."""
LOADER = ("get_train_dataloader", "_get_train_sampler")
"""Methods that decide which rows make which batch of the training."""

_MOST_NAMES = 6

_originals: dict[str, Any] = {}


def remember_originals(cls: type) -> None:
    """Keep the methods of whet's Trainer as they are defined, to compare with later."""
    _originals.update({name: inspect.getattr_static(cls, name) for name in dir(cls)})


def changed(trainer: Any, *names: str) -> bool:
    """Return whether a subclass, the instance or a patch replaced one of these methods."""
    return any(_is_replaced(trainer, name) for name in names)


def require_honoured(trainer: Any) -> None:
    """Raise ConfigError for replaced methods that whet's loop would never call."""
    refused = sorted(name for name in _REFUSED if _is_replaced(trainer, name))
    n_more = len(refused) - _MOST_NAMES
    if refused:
        raise ConfigError(
            what=f"{type(trainer).__name__} overrides methods that whet's Trainer does not call",
            got=", ".join(refused[:_MOST_NAMES]) + (f" and {n_more} more" if n_more > 0 else ""),
            why="whet has its own training loop, and would otherwise ignore these methods silently",
            fix=f"{ALTERNATIVE}; whet's Trainer calls overridden compute_loss, create_optimizer, create_scheduler, "
            "get_train_dataloader, get_eval_dataloader, evaluate, log and save_model",
        )


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether the function has a parameter of this name, or takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    return name in parameters or any(one.kind == one.VAR_KEYWORD for one in parameters.values())


def n_positional(function: Callable[..., Any]) -> int:
    """Return the number of positional parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in taken for one in parameters)


def accepted(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that the function takes: overrides for older releases have fewer parameters."""
    return {name: value for name, value in options.items() if accepts(function, name)}


def required(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that the function requires."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    needed = {name for name, one in parameters.items() if one.default is one.empty}
    return {name: value for name, value in options.items() if name in needed}


def user_save_model(trainer: Any) -> Callable[[Path], None] | None:
    """Return the overridden `save_model` of a Trainer as a function of the folder; None if it is whet's own."""
    save_model = trainer.save_model
    if not changed(trainer, "save_model"):
        return None
    return lambda folder: save_model(str(folder), **accepted(save_model, _internal_call=True))


def honoured() -> Iterable[str]:
    """Return the names of the methods that may be overridden."""
    return sorted({name for name, method in METHODS.items() if method.override == "honoured"} | HONOURED_INTERNAL)


def _is_replaced(trainer: Any, name: str) -> bool:
    if name in trainer.__dict__:
        return callable(trainer.__dict__[name])
    found = inspect.getattr_static(type(trainer), name, None)
    return found is not None and found is not _originals.get(name)
