"""What a task is: what its run consists of, and how a model that it has trained predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule
from whet.config.settings import broken
from whet.errors import ConfigError, Problem
from whet.jobs.rules import not_taken
from whet.models.loading.heads import Head

if TYPE_CHECKING:
    from whet.jobs.predict.arguments import PredictArguments

Shown = Mapping[str, tuple[str, str]]
"""Name of a metric -> the words for it, and the format of its value."""
OF_TRAINING: Shown = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("rows a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
}
"""What the table of every task begins with."""


def begin(args: TrainingArguments) -> None:
    """Refuse a resume with changed settings, and seed the generators: new weights are those of the run's seed."""
    from transformers import set_seed

    from whet.store import restore

    restore.check_early(args)
    set_seed(args.seed)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task is; `job` is its settings. The functions import what they need when they are called (`lazily`)."""

    name: str
    """That of its command, and of the task in the file next to a trained model (`jobs.predict.trained`)."""
    head: Head
    """The head that its models are loaded with."""
    rules: Sequence[Rule]
    """What is checked between the settings of the task and those of the training."""
    read: Callable[[Any, str], Any]
    """Returns the examples of a split: called with `job` and its name. Does not import torch."""
    takes: Sequence[str] = ()
    """Which of `jobs.fields.HONOURED_BY_CALLS` its `prepare` honours; the others are refused."""
    prepare: Callable[[Any, TrainingArguments, Mapping[str, Any]], Any]
    """Returns the Job over these examples, by split."""
    predict: Callable[[PredictArguments], int] | None = None
    """Writes the predictions that `whet predict` asks for; returns the exit code. None: it has nothing to predict."""
    shown: Shown
    """The metrics of the table at the end."""
    judged_by: Sequence[str]
    """The metrics that a model is judged by, if the settings name none: the first that an evaluation has."""
    lower_is_better: bool = False
    """Whether the smallest of this metric is the best."""
    tables: Callable[[Any], Sequence[str]] = lambda _: ()
    """Returns lines of its own that follow this table, from the Job that has run; the worst errors come after them."""

    def check(self, job: Any, args: TrainingArguments) -> list[Problem]:
        """Return the problems between the settings of the task and those of the training."""
        return broken(self.rules, job, args)

    def problems(self, job: Any, args: TrainingArguments) -> list[Problem]:
        """Return the problems between these settings: those that `check` finds, and options that are not taken."""
        refused = not_taken(job, f"whet {self.name}", self.takes)
        return [*([] if refused is None else [refused]), *self.check(job, args)]

    def prepared(self, job: Any, args: TrainingArguments, examples: Mapping[str, Any]) -> Any:
        """Return the Job of `prepare`, after what every run begins with."""
        begin(args)
        return self.prepare(job, args, examples)

    def lines(self, prepared: Any) -> list[str]:
        """Return the lines that follow the table at the end, from the Job that has run."""
        return [*self.tables(prepared), *prepared.worst]

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


def lazily(task: str, module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `name` of a module next to `task` when it is called: it loads torch.

    `task` is the `__name__` of a task's task.py.
    """
    folder = task.rpartition(".")[0]

    def call(*given: Any) -> Any:
        return getattr(import_module(f"{folder}.{module}"), name)(*given)

    return call
