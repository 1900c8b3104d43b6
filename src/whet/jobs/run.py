"""The command of a task: problems are reported before torch is loaded, then come the work and the summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet import log
from whet.config.arguments import TrainingArguments
from whet.config.ranks import require_output_for_restarts, restarted
from whet.config.settings import refuse
from whet.errors import WhetError
from whet.hardware import memory
from whet.jobs.places import may_hold_files, require_places
from whet.jobs.task import Shown, Task
from whet.watch import lock, printing, run_log, stop, table

USED_BY = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}
"""Split -> the setting that asks for it."""


def _continued(args: TrainingArguments) -> TrainingArguments:
    """Return the settings of a command that its launcher started again: it resumes from the newest checkpoint."""
    require_output_for_restarts(overwrites=args.do_train and args.overwrite_output_dir)
    resumes = restarted() and args.do_train and args.resume_from_checkpoint is None
    return replace(args, resume_from_checkpoint="auto") if resumes else args


@contextmanager
def _saying_what_is_kept(args: TrainingArguments) -> Iterator[None]:
    """Have the error of a run that memory or threads run out for name the newest checkpoint, and how to resume."""
    try:
        yield
    except Exception as error:
        lack = None if isinstance(error, WhetError) or not args.do_train else memory.lack(error)
        if lack is None:
            raise
        from whet.store import find, write

        with suppress(OSError):
            if newest := find.would_resume(Path(args.output_dir)):
                lack = write.resumable(lack, newest, {"resume_from_checkpoint": "auto"})
        raise lack from error


def show(shown: Shown, metrics: Mapping[str, float], folder: Path, total_s: float, lines: Sequence[str] = ()) -> None:
    """Print what the run reached, how fast, and where its files are: the table at its end, and these lines."""
    with run_log.written_to(folder):
        printing.show([*table.lines(shown, metrics, folder, total_s), *lines])


def run_job(task: Task, job: Any, args: TrainingArguments) -> int:
    """Run the command in its output folder, and show its metrics; return the exit code."""
    args = _continued(args)
    log.set_up(logging.WARNING if args.should_log else logging.ERROR)
    printing.configure(args)
    refuse(task.problems(job, args))
    if args.enable_jit_checkpoint is False:
        stop.restore()
    if args.should_save:
        lock.refuse_taken(Path(args.output_dir))
    require_places(job, args)
    started_s = time.perf_counter()
    kept, taken = _saying_what_is_kept(args), lock.output_folder(args.output_dir, may_hold_files(args))
    with kept, taken as folder, run_log.buffered():
        examples = {name: task.read(job, name) for name, wanted in USED_BY.items() if getattr(args, wanted)}
        if job.seeds > 1:
            from whet.jobs.seeds import run_seeds

            metrics, lines = run_seeds(task, job, args, examples)
        else:
            prepared = task.prepared(job, args, examples)
            metrics, lines = prepared.run(), task.tables(prepared)
        stop.mark_work_done()
        show(task.shown, metrics, folder, time.perf_counter() - started_s, lines)
    return 0
