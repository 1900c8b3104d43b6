"""From transformers' own TrainingArguments to whet's, field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, Problem

_THEIR_MODULE = "transformers.training_args"
_COPIED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Older names of transformers -> the newer ones, which it keeps equal."""


def arguments_of(args: Any) -> TrainingArguments:
    """Return whet's settings for what a Trainer was given: None, whet's own, or those of transformers.

    Fields that were left at transformers' defaults take whet's defaults. Raises ConfigError with every other field
    that whet does not carry out.
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


def _changed(args: Any, theirs: Any) -> dict[str, Any]:
    """Return the fields that differ from those of new arguments of transformers' class, and where the run is."""
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
        what="args are no TrainingArguments",
        got=type(args).__name__,
        why="a Trainer takes whet.TrainingArguments, or those of transformers, which it translates",
        fix="use whet.TrainingArguments(output_dir='out', ...); from a dict: whet.TrainingArguments(**it)",
    )


def _unknown_field(args: Any, name: str) -> Problem:
    return Problem(
        what=f"whet does not honour {name} of {type(args).__name__}",
        got=f"{name}={getattr(args, name)!r}",
        why="it is no field of transformers' TrainingArguments, and whet never ignores a setting",
        fix=f"leave {name} at its default, or use transformers' own Trainer with whet.optimize(model)",
    )
