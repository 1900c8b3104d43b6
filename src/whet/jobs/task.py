"""What the run of a task consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, Problem
from whet.jobs.summary import Shown


@dataclass(frozen=True)
class Task:
    """What the run of a task consists of; `job` is the settings of the task."""

    check: Callable[[Any, TrainingArguments], Sequence[Problem]]
    """Returns the problems between the settings of the task and those of the training."""
    read: Callable[[Any, str], Any]
    """Returns the examples of a split: called with `job` and its name."""
    prepare: Callable[[Any, TrainingArguments, Mapping[str, Any]], Any]
    """Returns the Job over these examples, by split. The first call imports torch."""
    shown: Shown
    """The metrics of the table at the end."""
    judged_by: Sequence[str]
    """The metrics that a model is judged by, if the settings name none: the first that an evaluation has."""
    lower_is_better: bool = False
    """Whether the smallest of this metric is the best."""
    tables: Callable[[Any], Sequence[str]] = lambda _: ()
    """Returns the lines that follow this table, from the Job that has run."""

    def best_by(self, metrics: Mapping[str, float], args: TrainingArguments) -> tuple[str, bool]:
        """Return which of the metrics of an evaluation the best model is chosen by, and whether more is better."""
        wanted = args.metric_for_best_model
        if wanted is None:
            return next(name for one in self.judged_by if (name := f"eval_{one}") in metrics), not self.lower_is_better
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            raise ConfigError(
                what="metric_for_best_model names no metric of the evaluation",
                got=wanted,
                why=f"the evaluation computed {', '.join(one for one in metrics if one.startswith('eval_'))}",
                fix="use one of these in --metric_for_best_model",
            )
        return name, bool(args.greater_is_better)
