"""The rules about trackers that would ignore what they are given."""

from __future__ import annotations

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule
from whet.errors import Problem

_WITH_NAMES = ("wandb", "mlflow", "trackio")


def run_name_is_read(args: TrainingFields) -> Problem | None:
    """TensorBoard has no names of runs, only folders."""
    if args.run_name is None or set(_WITH_NAMES) & set(args.report_to):
        return None
    return Problem(
        what="run_name is given, but no tracker reads it",
        got=f"run_name={args.run_name}, report_to={','.join(args.report_to) or 'none'}",
        why=f"of the trackers, {', '.join(_WITH_NAMES)} give their runs a name; TensorBoard has folders",
        fix="add one of them to --report_to, or leave --run_name out; --logging_dir is TensorBoard's folder",
    )


LOGGING_RULES: tuple[Rule, ...] = (run_name_is_read,)
