"""Translation of transformers' TrainingArguments to whet's, field by field."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, Problem

_THEIR_MODULE = "transformers.training_args"
_COPIED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Older names of transformers -> the newer ones; transformers keeps both equal."""


def arguments_of(args: Any) -> TrainingArguments:
    """Return whet's settings for a Trainer's args: None, whet's own, or those of transformers.

    Fields with transformers' defaults get whet's defaults. Raises ConfigError with every other field that whet does
    not carry out.
    """
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingArguments):
        return args
    theirs = next((kind for kind in type(args).__mro__ if kind.__module__ == _THEIR_MODULE), None)
    if theirs is None:
        raise _no_arguments(args)
    own = {one.name for one in _fields(theirs)}
    strange = [one for one in _fields(type(args)) if one.name not in own and getattr(args, one.name) != _usual(one)]
    if strange:
        raise ConfigError.of([_unknown_field(args, one.name) for one in strange])
    return TrainingArguments(**_changed(args, theirs))


class Given:
    """A Trainer's original arguments: transformers' ones can be changed later, when whet no longer reads them."""

    def __init__(self, args: Any) -> None:
        self.translated = arguments_of(args)
        self._args = args
        self._before = {} if args is self.translated else _values(args)

    def require_unchanged(self, used: TrainingArguments) -> None:
        """Raise ConfigError with the fields that were changed since, unless the arguments were replaced."""
        if used is not self.translated or not self._before:
            return
        changed = {name: value for name, value in _values(self._args).items() if value != self._before[name]}
        if changed:
            raise _set_too_late(self._args, changed)


def _values(args: Any) -> dict[str, Any]:
    values = {one.name: getattr(args, one.name) for one in _fields(type(args))}
    return {name: copy.copy(one) if isinstance(one, dict | list) else one for name, one in values.items()}


def _set_too_late(args: Any, changed: dict[str, Any]) -> ConfigError:
    shown = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return ConfigError(
        what=f"{', '.join(changed)} of {type(args).__name__} changed after the Trainer was made",
        got=shown,
        why="a Trainer translates transformers' arguments when it is made, and this change came later",
        fix="make a new Trainer with these arguments, or set them before whet.Trainer(...)",
    )


def _changed(args: Any, theirs: Any) -> dict[str, Any]:
    """Return the fields that differ from new arguments of transformers' class, and the output folder."""
    usual = theirs(output_dir=args.output_dir, use_cpu=args.use_cpu)
    names = [one.name for one in _fields(theirs) if one.init]
    changed = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(usual, name)}
    for older, newer in _COPIED.items():
        if changed.get(older) == changed.get(newer):
            changed.pop(newer, None)
    return changed | {"output_dir": args.output_dir} | ({"use_cpu": True} if args.use_cpu else {})


def _usual(one: Any) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _fields(kind: type) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _no_arguments(args: Any) -> ConfigError:
    return ConfigError(
        what="args are not TrainingArguments",
        got=type(args).__name__,
        why="a Trainer takes whet.TrainingArguments, or those of transformers, which it translates",
        fix="use whet.TrainingArguments(output_dir='out', ...); from a dict: whet.TrainingArguments(**it)",
    )


def _unknown_field(args: Any, name: str) -> Problem:
    return Problem(
        what=f"whet does not honour {name} of {type(args).__name__}",
        got=f"{name}={getattr(args, name)!r}",
        why="it is not a field of transformers' TrainingArguments, and whet never ignores a setting",
        fix=f"leave {name} at its default, or use transformers' own Trainer with whet.optimize(model)",
    )
