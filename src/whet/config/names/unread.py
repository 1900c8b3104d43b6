"""Settings without effect under the chosen strategy: transformers accepts them silently, whet logs them."""

from __future__ import annotations

from whet.config.fields import TrainingFields
from whet.config.options import options_of
from whet.config.rules.schedule import BY_METRIC

_READ_BY = {
    "eval_steps": ("eval_strategy", "steps"),
    "save_steps": ("save_strategy", "steps"),
    "save_interval_s": ("save_strategy", "time"),
    "logging_steps": ("logging_strategy", "steps"),
}
"""Field -> the only strategy that reads it."""


def unread(args: TrainingFields) -> list[str]:
    """Return a note for each field that was changed from its default and has no effect in this run."""
    notes = []
    for name, (strategy, needed) in _READ_BY.items():
        is_now = getattr(args, strategy)
        if is_now != needed and _is_set(args, name) and not _also_evaluates(args, name):
            shown = getattr(args, name)
            notes.append(f"{name}={shown} has no effect with {strategy} {is_now}: set {strategy} {needed} to use it")
    if args.save_strategy == "no" and _is_set(args, "save_total_limit"):
        notes.append(
            f"save_total_limit={args.save_total_limit} counts only checkpoints that a signal or a callback asks for: "
            "save_strategy is no"
        )
    return [*notes, *_about_order(args), *_about_schedule(args)]


def _about_order(args: TrainingFields) -> list[str]:
    """Return notes for settings without effect on the order of rows, by transformers' rules."""
    notes, strategy = [], args.train_sampling_strategy
    by_length = ("group_by_length", "batch_rebalance")
    if strategy not in by_length and _is_set(args, "length_column_name"):
        notes.append(
            f"length_column_name={args.length_column_name} has no effect: it is for train_sampling_strategy "
            f"{' and '.join(by_length)}, and train_sampling_strategy is {strategy}"
        )
    if strategy == "batch_rebalance" and args.data_seed is None and _is_set(args, "seed"):
        notes.append(
            f"seed={args.seed} has no effect on the order of rows: batch_rebalance shuffles with seed 42, as in "
            "transformers; data_seed changes it"
        )
    return notes


def _about_schedule(args: TrainingFields) -> list[str]:
    """Return notes for a schedule that follows a metric: its mode is min by default."""
    kwargs = args.lr_scheduler_kwargs or {}
    if args.lr_scheduler_type not in BY_METRIC or "mode" in kwargs or not args.greater_is_better:
        return []
    return [
        f"{args.lr_scheduler_type} treats a smaller {args.metric_for_best_model} as better, as in transformers; "
        'to change that, use lr_scheduler_kwargs {"mode": "max"}'
    ]


def _is_set(args: TrainingFields, name: str) -> bool:
    return getattr(args, name) != options_of(type(args))[name].default


def _also_evaluates(args: TrainingFields, name: str) -> bool:
    """Evaluations run every logging_steps if eval_steps is not given."""
    return name == "logging_steps" and args.eval_strategy == "steps" and args.eval_steps == args.logging_steps
