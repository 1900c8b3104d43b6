"""`whet classify`: train, evaluate and predict with a text classifier."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import MAIN_OPTIONS, USAGE, missing_places
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.rules import LOWER_IS_BETTER, check_run


def _run(job: ClassifyArguments, args: TrainingArguments) -> Callable[[], int]:
    from whet.jobs.run import run_job
    from whet.tasks.classify.run import TASK

    return partial(run_job, TASK, job, args)


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """metric_name is what the best model is judged by."""
    name = given.get("metric_name")
    if name is None or given.get("metric_for_best_model") is not None:
        return {}
    better = given.get("greater_is_better")
    if better is None:
        better = name not in LOWER_IS_BETTER
    return {"metric_for_best_model": name, "greater_is_better": better}


COMMAND = Command(
    name="whet classify",
    summary=(
        "Fine-tune a model that gives texts, or pairs of texts, one label, several labels or a number; evaluate it and"
        " predict. The options are those of transformers' run_classification.py and TrainingArguments; their older"
        " names work too."
    ),
    usage=USAGE,
    examples=(
        "whet classify --model_name_or_path distilbert-base-uncased --train_file train.csv --do_train --output_dir out",
        "whet classify run.yaml --metric_name accuracy --load_best_model_at_end --output_dir out",
    ),
    parts=(ClassifyArguments, TrainingArguments),
    main=(*MAIN_OPTIONS, "text_column_names", "label_column_name"),
    lone="config",
    takes_config=True,
    check=check_run,
    places=missing_places,
    usual=_usual,
    run=_run,
)
