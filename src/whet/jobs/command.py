"""The command that trains a task: `whet NAME`, the same for every task but for its options and its texts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.errors import Problem
from whet.jobs.fields import JobFields
from whet.jobs.task import Task

MAIN_OPTIONS = (
    "model_name_or_path", "dataset_name", "train_file", "validation_file", "output_dir", "do_train", "do_eval",
    "resume_from_checkpoint", "auto", "precision", "per_device_train_batch_size", "learning_rate", "num_train_epochs",
)  # fmt: skip
"""What the short help text of each shows, next to options of its own."""


def least_is_best(*metrics: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a `usual` for `training_command`: the best model has the smallest of a metric that is one of these."""

    def usual(given: Mapping[str, Any]) -> dict[str, Any]:
        name = str(given.get("metric_for_best_model")).removeprefix("eval_")
        return {"greater_is_better": False} if name in metrics and given.get("greater_is_better") is None else {}

    return usual


def training_command(
    task: Task,
    settings: type[JobFields],
    *,
    summary: str,
    examples: tuple[str, ...],
    main: tuple[str, ...] = (),
    **more: Any,
) -> Command:
    """Return the command that trains, evaluates and predicts with these settings; `more` as in `Command`.

    `main` are the task's own options that the short help text shows.
    """

    def run(job: JobFields, args: TrainingArguments) -> Callable[[], int]:
        from whet.jobs.run import run_job

        return partial(run_job, task, job, args)

    def missing_places(job: JobFields, args: TrainingArguments) -> list[Problem]:
        from whet.jobs.places import check_places

        return check_places(job, args)

    return Command(
        name=f"whet {task.name}",
        summary=summary,
        usage="[FILE.yaml | FILE.json] [--OPTION VALUE ...]",
        examples=examples,
        parts=(settings, TrainingArguments),
        main=(*(name for name in MAIN_OPTIONS if task.by_engine or name != "auto"), *main),
        lone="config",
        takes_config=True,
        check=task.problems,
        places=missing_places,
        run=run,
        **more,
    )
