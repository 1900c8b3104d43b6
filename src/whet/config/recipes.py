"""Recipes: named values for settings that the user does not give. Each setting can also be given alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.card import Card
from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule, at_least, broken_if, within
from whet.config.rules.schedule import WITHOUT_WARMUP
from whet.config.rules.sharing import stage_of
from whet.errors import Problem

CARD = Card(
    name="few samples",
    asked_by="recipe, min_steps, layerwise_lr_decay, reinit_layers, weight_averaging_start, span_loss",
    does="More updates, a warm-up and other settings for little data.",
    improves="neither",
    same_result="no",
    hurts="With thousands of training examples.",
    source="Zhang et al. 2021, arXiv:2006.05987; Mosbach et al. 2021, arXiv:2006.04884",
    page="adapt.md#little-data",
)
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "few_samples": {
        "min_steps": 300, "warmup_steps": 0.1, "lr_scheduler_type": "constant_with_warmup", "reinit_layers": 1,
        "weight_averaging_start": 0.5,
    },
}  # fmt: skip
"""Name -> setting -> value. docs/adapt.md says how a setting becomes a part of it."""
_GIVEN_INSTEAD = {
    "min_steps": (("max_steps", -1),), "warmup_steps": (("warmup_ratio", 0.0),),
}  # fmt: skip
"""Setting of a recipe -> others that decide the same unless they have this value: then the recipe's is left out."""


def values_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the recipe named in these settings has for settings that are not given."""
    recipe = RECIPES.get(given.get("recipe") or "", {})
    return {name: value for name, value in recipe.items() if not _is_decided(name, given)}


def in_force(args: TrainingFields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the run's recipe that have its values, and those that the user gave other values."""
    recipe = RECIPES.get(args.recipe or "", {})
    now = {name: getattr(args, name) for name in recipe}
    kept = {name: value for name, value in now.items() if value == recipe[name]}
    return kept, {name: value for name, value in now.items() if name not in kept}


def sets(args: TrainingFields, name: str) -> bool:
    """Return whether the value of this setting is the recipe's."""
    return args.recipe is not None and name in in_force(args)[0]


def described(args: TrainingFields) -> list[str]:
    """Return what the run's recipe set and what it left as given, in parts of a line; empty without a recipe."""
    if args.recipe is None:
        return []
    kept, others = in_force(args)
    left = [f"as given: {name} {_written(value)}" for name, value in others.items()]
    first, *more = [f"{name} {_written(value)}" for name, value in kept.items()] or ["sets nothing"]
    return [f"{args.recipe}: {first}", *more, *left]


def _is_decided(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether what the user gave decides this setting, or does not go with it."""
    if name in given or (name == "warmup_steps" and given.get("lr_scheduler_type") in WITHOUT_WARMUP):
        return True
    if name == "weight_averaging_start" and _shares_weights(given):
        return True
    return any(given.get(other, off) != off for other, off in _GIVEN_INSTEAD.get(name, ()))


def _shares_weights(given: Mapping[str, Any]) -> bool:
    """Return whether the weights have no average: ranks have a part of them (ZeRO 2, 3)."""
    return given.get("deepspeed") is not None or (given.get("zero_stage") or stage_of(given.get("fsdp")) or 0) >= 2


def _written(value: object) -> str:
    return "null" if value is None else str(value)


def recipe_sets_something(args: TrainingFields) -> Problem | None:
    """A recipe whose settings are all given otherwise would have no effect."""
    kept, others = in_force(args)
    if args.recipe is None or kept:
        return None
    return Problem(
        what=f"recipe {args.recipe} sets nothing",
        got=", ".join(f"{name}={value}" for name, value in others.items()),
        why="every setting of it is given, and given settings win; dataclasses.replace and parsers of a program's "
        "arguments give all settings",
        fix=f"leave --recipe out, or give only settings of your own: TrainingArguments('out', recipe={args.recipe!r})",
    )


RECIPE_RULES: tuple[Rule, ...] = (
    recipe_sets_something,
    at_least("min_steps", 1, "a run has an optimizer step"),
    broken_if(
        "one_length",
        ("min_steps", "max_steps"),
        lambda args: args.min_steps is not None and args.max_steps > 0,
        what="min_steps has no effect next to max_steps",
        why="max_steps is the length of the run; min_steps is a lower bound for what num_train_epochs asks for",
        fix="keep one of --min_steps and --max_steps",
    ),
    within("layerwise_lr_decay", "(0, 1]", "each block learns at this times the rate of the block above it", 0.9),
    at_least("reinit_layers", 0, "it counts blocks"),
    within("weight_averaging_start", "[0, 1)", "the average begins after this share of the optimizer steps", 0.5),
)
