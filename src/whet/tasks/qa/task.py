"""`whet qa`, `whet ask` and `whet demo`: the commands of question answering, and what its run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import training_command
from whet.jobs.fields import HONOURED_BY_CALLS
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.task import Task
from whet.models.loading.heads import QUESTION_ANSWERING
from whet.tasks.qa.arguments import SHOWN, AskArguments, DemoArguments, QaArguments, check_run

if TYPE_CHECKING:
    from whet.jobs.job import Job
    from whet.tasks.qa.types import Questions


def _read(qa: QaArguments, name: str) -> Questions:
    from whet.tasks.qa.metrics import check_scorable
    from whet.tasks.qa.splits import read_split

    questions = read_split(qa, name)
    if name == "validation":
        check_scorable(questions, version_2=qa.version_2_with_negative)
    return questions


def _prepare(qa: QaArguments, args: TrainingArguments, questions: Mapping[str, Questions]) -> Job:
    from whet.tasks.qa.job import prepare

    return prepare(qa, args, questions)


def _predict(asked: PredictFields) -> int:
    from whet.tasks.qa.job import predict

    return predict(asked)


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluation of answers has no loss, so the best model is the one with the highest F1."""
    asked = given.get("load_best_model_at_end") or given.get("save_strategy") == "best"
    return {"metric_for_best_model": "f1"} if asked and given.get("metric_for_best_model") is None else {}


def _ask(asked: AskArguments) -> int:
    from whet.tasks.qa.ask import run_ask

    return run_ask(asked)


def _demo(demo: DemoArguments) -> int:
    from whet.tasks.qa.demo import run_demo

    return run_demo(demo)


TASK = Task(
    name="qa",
    head=QUESTION_ANSWERING,
    check=check_run,
    read=_read,
    prepare=_prepare,
    takes=HONOURED_BY_CALLS,
    predict=_predict,
    shown=SHOWN,
    judged_by=("f1",),
)
QA = training_command(
    TASK,
    QaArguments,
    main=("max_seq_length",),
    summary=(
        "Fine-tune a model for extractive question answering, evaluate it, and predict answers. The options are those"
        " of the guides' run_qa.py and of transformers' TrainingArguments; their older names work too."
    ),
    examples=(
        "whet qa --model_name_or_path distilbert-base-uncased --dataset_name squad --do_train --do_eval",
        "whet qa run.yaml --bf16 --learning_rate 3e-5 --output_dir out",
    ),
    usual=_usual,
)
ASK = Command(
    name="whet ask",
    summary="Find the answers to questions in a text, with a model that whet qa trained.",
    usage="MODEL --context FILE --question TEXT [--OPTION VALUE ...]",
    examples=(
        'whet ask out --context notes.txt --question "Who found it?" --question "When?"',
        'cat notes.txt | whet ask out --context - --question "Who found it?"',
    ),
    parts=(AskArguments,),
    lone="model",
    run=_ask,
)
DEMO = Command(
    name="whet demo",
    summary="Train a small model to answer questions, and show it at work. Nothing is downloaded.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo", "whet demo --output_dir demo --num_train_epochs 5 --seed 7"),
    parts=(DemoArguments,),
    run=_demo,
)
COMMANDS = (QA, ASK, DEMO)
