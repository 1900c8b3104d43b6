"""The beginning and the end of a task's command: what is wrong is reported before torch is loaded, then the summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from whet import log
from whet.config.arguments import TrainingArguments
from whet.config.settings import refuse
from whet.errors import Problem
from whet.jobs.fields import JobFields
from whet.jobs.places import may_hold_files, require_places
from whet.jobs.summary import Shown, show
from whet.train.control import lock, stop
from whet.train.output import printing, run_log


def run_job(
    job: JobFields,
    args: TrainingArguments,
    problems: Sequence[Problem],
    work: Callable[[], dict[str, float]],
    shown: Shown,
    lines: Sequence[str] = (),
) -> int:
    """Do the work in its output folder, show its metrics and then these lines, and return the exit code."""
    log.set_up(logging.WARNING)
    printing.configure(args)
    refuse(problems)
    if args.enable_jit_checkpoint is False:
        stop.restore()
    lock.refuse_taken(Path(args.output_dir))
    require_places(job, args)
    started_s = time.perf_counter()
    with lock.output_folder(args.output_dir, may_hold_files(args)) as folder, run_log.buffered():
        metrics = work()
        stop.mark_work_done()
        show(shown, metrics, folder, time.perf_counter() - started_s, lines)
    return 0
