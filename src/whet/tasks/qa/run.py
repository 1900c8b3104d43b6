"""`whet qa`: from files to a trained, evaluated, saved model."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from whet import log
from whet.config.arguments import TrainingArguments
from whet.config.settings import refuse
from whet.jobs.places import may_hold_files, require_places
from whet.jobs.summary import show
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.evaluate.metrics import check_scorable
from whet.tasks.qa.rules import check_run
from whet.tasks.qa.splits import read_split
from whet.tasks.qa.summary import SHOWN
from whet.tasks.qa.types import Questions
from whet.train.control import lock, stop
from whet.train.output import printing, run_log


def run_qa(qa: QaArguments, args: TrainingArguments) -> int:
    """Run the command; return its exit code. Problems of folder or data are raised before torch is loaded."""
    log.set_up(logging.WARNING)
    printing.configure(args)
    refuse(check_run(qa, args))
    if args.enable_jit_checkpoint is False:
        stop.restore()
    lock.refuse_taken(Path(args.output_dir))
    require_places(qa, args)
    started_s = time.perf_counter()
    with lock.output_folder(args.output_dir, may_hold_files(args)) as folder, run_log.buffered():
        questions = _read(qa, args)

        from whet.tasks.qa.job import QaJob

        metrics = QaJob.prepare(qa, args, questions).run()
        stop.mark_work_done()
        show(SHOWN, metrics, folder, time.perf_counter() - started_s)
    return 0


def _read(qa: QaArguments, args: TrainingArguments) -> dict[str, Questions]:
    """Return the questions of each split that the run uses."""
    wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    questions = {name: read_split(qa, name) for name, want in wanted.items() if want}
    if "validation" in questions:
        check_scorable(questions["validation"], version_2=qa.version_2_with_negative)
    return questions
