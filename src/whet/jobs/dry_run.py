"""A run that is only planned: data and settings are those of the run, the weights have sizes and no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.engine.forecast import Forecast, of_run
from whet.engine.update import build_optimizer
from whet.hardware import memory, trim
from whet.jobs.task import Task
from whet.log import logger
from whet.plan import rates as known_rates
from whet.plan.rates import Rates
from whet.plan.rehearsal import Rehearsal
from whet.store import weights

_LATER_BYTES = 110 << 20
"""What a process holds more at its peak than a plan of its run: modules that are imported later, those of the report
among them, and memory of the preparation that does not fit what comes. Fitted to runs (`benchmarks/plan/run.py`)."""


def examples_of(task: Task, job: Any, args: TrainingArguments) -> dict[str, Any]:
    """Return the examples that this run trains on and evaluates, by split."""
    wanted = (("train", args.do_train), ("validation", args.do_eval))
    return {name: task.examples(job, name) for name, is_read in wanted if is_read}


def forecast(
    task: Task,
    job: Any,
    args: TrainingArguments,
    examples: Mapping[str, Any] | None = None,
    held_bytes: int | None = None,
) -> Forecast:
    """Return what this run will take. It reads the data and the sizes of the model's weights, and writes nothing.

    `held_bytes` is that of the forecast of another run of the same task: since then this process has grown.
    """
    examples = examples_of(task, job, args) if examples is None else examples
    if args.torch_compile:  # a graph cannot be traced over weights without values
        logger.warning("the forecast is that of blocks which are not compiled")
        args = replace(args, torch_compile=False, torch_compile_backend=None, torch_compile_mode=None)
    rehearsal = Rehearsal()
    with rehearsal:
        engine = task.begin(job, args, examples).engine
        run = engine.planned()
        optimizer, _ = build_optimizer(run.model, run.args, run.plan.n_steps)
    if trim.why_not() is None:
        trim.trim()()
    held = (memory.resident_bytes() or 0) + _LATER_BYTES if held_bytes is None else held_bytes
    return of_run(run, args.precision, optimizer, held, rehearsal)


def rates_for(args: TrainingArguments, say: Callable[[str], None], report: str | None = None) -> Rates | None:
    """Return the rates of the machine in the report of whet doctor, or of this one, which may be measured first.

    None, and why it is so, if the report has none, or if the run here would use a GPU.
    """
    if report is not None:
        found = known_rates.of_report(Path(report))
        if found is None:
            say(f"no time: {report} has no rates; run on that machine: whet doctor --rates --json")
        return found
    if weights.device_of(args.use_cpu).type != "cpu":
        say("no time: what a GPU does in a second is not measured")
        return None
    return known_rates.of_this_machine(say)
