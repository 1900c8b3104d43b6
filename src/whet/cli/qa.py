"""`whet qa`: train, evaluate and predict with a question answering model."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import MAIN_OPTIONS, USAGE, missing_places
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.rules import check_run


def _run(qa: QaArguments, args: TrainingArguments) -> Callable[[], int]:
    from whet.jobs.run import run_job
    from whet.tasks.qa.run import TASK

    return partial(run_job, TASK, qa, args)


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluation of answers has no loss, so the best model is the one with the highest F1."""
    asked = given.get("load_best_model_at_end") or given.get("save_strategy") == "best"
    return {"metric_for_best_model": "f1"} if asked and given.get("metric_for_best_model") is None else {}


COMMAND = Command(
    name="whet qa",
    summary=(
        "Fine-tune a model for extractive question answering, evaluate it, and predict answers. The options are those"
        " of the guides' run_qa.py and of transformers' TrainingArguments; their older names work too."
    ),
    usage=USAGE,
    examples=(
        "whet qa --model_name_or_path distilbert-base-uncased --dataset_name squad --do_train --do_eval",
        "whet qa run.yaml --bf16 --learning_rate 3e-5 --output_dir out",
    ),
    parts=(QaArguments, TrainingArguments),
    main=(*MAIN_OPTIONS, "max_seq_length"),
    lone="config",
    takes_config=True,
    check=check_run,
    places=missing_places,
    usual=_usual,
    run=_run,
)
