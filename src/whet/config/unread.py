"""Settings that nothing reads, because their strategy is another: transformers takes them in silence, whet says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.config.options import options_of

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_READ_BY = {
    "eval_steps": ("eval_strategy", "steps"),
    "save_steps": ("save_strategy", "steps"),
    "save_interval_s": ("save_strategy", "time"),
    "logging_steps": ("logging_strategy", "steps"),
}
"""Field -> the only strategy that reads it."""


def unread(args: TrainingArguments) -> list[str]:
    """Return a note for each field that was set to something else than its default and has no effect in this run."""
    notes = []
    for name, (strategy, needed) in _READ_BY.items():
        is_now = getattr(args, strategy)
        if is_now != needed and _is_set(args, name) and not _also_evaluates(args, name):
            shown = getattr(args, name)
            notes.append(f"{name}={shown} has no effect: it is for {strategy} {needed}, and {strategy} is {is_now}")
    if args.save_strategy == "no" and _is_set(args, "save_total_limit"):
        notes.append(
            f"save_total_limit={args.save_total_limit} counts only checkpoints that a signal or a callback asks for: "
            "save_strategy is no"
        )
    return notes


def _is_set(args: TrainingArguments, name: str) -> bool:
    return getattr(args, name) != options_of(type(args))[name].default


def _also_evaluates(args: TrainingArguments, name: str) -> bool:
    """Evaluations come every logging_steps where eval_steps are not given."""
    return name == "logging_steps" and args.eval_strategy == "steps" and args.eval_steps == args.logging_steps
