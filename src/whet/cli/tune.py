"""`whet tune`: many trainings of one command with other values of its settings, and the best model of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet import tasks
from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.errors import ConfigError, Problem
from whet.jobs.tune_arguments import TuneArguments, searched_problems

_HELP = ("--help", "-h")


def _trained() -> list[str]:
    return [name for name, entry in tasks.entries().items() if entry.does == "trains"]


def command_for(words: Sequence[str]) -> Command:
    """Return the command with the options of the task that the first word names."""
    known = _trained()
    first = words[0] if words and words[0] not in _HELP else known[0]
    if first not in known:
        raise ConfigError(
            what="the task to tune is unknown",
            got=first,
            why=f"whet tune starts trainings of {', '.join(known)}",
            fix=f"name one of them first: whet tune {known[0]} --search learning_rate=1e-5:1e-3:log ...",
        )
    training, task = tasks.command(first), next(one for one in tasks.tasks() if one.name == first)

    def usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
        evaluates = {"do_train": True, "do_eval": True, "eval_strategy": "epoch", "save_strategy": "no"}
        if given.get("load_best_model_at_end") or given.get("save_strategy") == "best":
            evaluates["save_strategy"] = "epoch"
        return {**training.usual(given), **{name: value for name, value in evaluates.items() if name not in given}}

    def problems(asked: TuneArguments, job: Any, args: TrainingArguments) -> list[Problem]:
        return [*task.problems(job, args), *searched_problems(asked, job, args, task)]

    def run(asked: TuneArguments, job: Any, args: TrainingArguments) -> int:
        from whet.jobs.tune import tune

        return tune(task, asked, job, args)

    return replace(
        training,
        name="whet tune",
        summary=(
            "Train many times with other values of some settings, drop what falls behind early, and end with the best"
            f" model. The options are those of the training; those of {training.name} now."
        ),
        usage="TASK --search NAME=VALUES ... [--trials N] [--time_limit 30m] [--OPTION VALUE ...]",
        examples=(
            "whet tune classify --search learning_rate=1e-5:1e-3:log num_train_epochs=2,4",
            "whet tune qa --search lora_r=4:32:log --trials 20 --time_limit 2h",
        ),
        parts=(TuneArguments, *training.parts),
        main=("task", "search", "trials", "time_limit", "min_epochs", *(one for one in training.main if one != "auto")),
        lone="task",
        second_lone="search",
        check=problems,
        places=lambda _, job, args: training.places(job, args),
        usual=usual,
        run=run,
    )
