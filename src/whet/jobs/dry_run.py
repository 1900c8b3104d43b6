"""A run that is only planned: data and settings are those of the run, the weights have sizes and no values."""

from __future__ import annotations

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.engine.forecast import Forecast, Held, of_run
from whet.engine.update import build_optimizer
from whet.hardware import memory, trim
from whet.jobs.task import Task
from whet.plan.rehearsal import Rehearsal


def forecast(task: Task, job: Any, args: TrainingArguments) -> Forecast:
    """Return what this run will take. It reads the data and the sizes of the model's weights, and writes nothing."""
    examples = {
        name: task.read(job, name)
        for name, wanted in (("train", args.do_train), ("validation", args.do_eval))
        if wanted
    }
    rehearsal = Rehearsal()
    with rehearsal:
        engine = task.prepared(job, args, examples).engine
        run = engine.planned()
        optimizer, _ = build_optimizer(run.model, run.args, run.plan.n_steps)
    if trim.why_not() is None:
        trim.trim()()
    held = Held(resident_bytes=memory.resident_bytes() or 0, planned=True)
    return of_run(run, args.precision, optimizer, held, rehearsal)
