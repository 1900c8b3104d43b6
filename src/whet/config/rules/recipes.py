"""The rules about recipes, and about the settings that they are made of."""

from __future__ import annotations

from whet.config.fields import TrainingFields
from whet.config.recipes import in_force
from whet.config.rules.ranges import Rule, at_least
from whet.errors import Problem


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


def one_length(args: TrainingFields) -> Problem | None:
    """max_steps is the length of the run, so there is nothing for min_steps to decide."""
    if args.min_steps is None or args.max_steps <= 0:
        return None
    return Problem(
        what="min_steps has no effect next to max_steps",
        got=f"min_steps={args.min_steps}, max_steps={args.max_steps}",
        why="max_steps is the length of the run; min_steps is a lower bound for what num_train_epochs asks for",
        fix="keep one of --min_steps and --max_steps",
    )


def decay_is_a_factor(args: TrainingFields) -> Problem | None:
    """At 0 nothing below the head would learn; above 1 the lowest blocks would learn fastest."""
    if 0 < args.layerwise_lr_decay <= 1:
        return None
    return Problem(
        what="layerwise_lr_decay is not a factor above 0 and up to 1",
        got=args.layerwise_lr_decay,
        why="the learning rate of each block is this times that of the block above it",
        fix="use --layerwise_lr_decay 0.9, or 1 for one learning rate",
    )


def averaging_starts_within_the_run(args: TrainingFields) -> Problem | None:
    """An average that begins after the last step would be one of nothing."""
    start = args.weight_averaging_start
    if start is None or 0 <= start < 1:
        return None
    return Problem(
        what="weight_averaging_start is not a share of the run",
        got=start,
        why="the average begins after this share of the optimizer steps, and must begin before the last one",
        fix="use --weight_averaging_start 0.5 for the second half of the run, or leave it out",
    )


RECIPE_RULES: tuple[Rule, ...] = (
    recipe_sets_something,
    at_least("min_steps", 1, "a run has an optimizer step"),
    one_length,
    decay_is_a_factor,
    at_least("reinit_layers", 0, "it counts blocks"),
    averaging_starts_within_the_run,
)
