"""A run that is only planned: data and settings are those of the run, the weights have sizes and no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whet.config.arguments import TrainingArguments
from whet.engine.forecast import Forecast, of_run
from whet.engine.update import build_optimizer
from whet.errors import WhetError
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
_ARENA_BYTES, _OTHER_THREADS = 128 << 20, 3
"""Addresses that glibc takes for each thread that allocates; next to those that compute some prepare and save."""


def examples_of(task: Task, job: Any, args: TrainingArguments) -> dict[str, Any]:
    """Return the examples that this run trains on and evaluates, by split."""
    wanted = (("train", args.do_train), ("validation", args.do_eval))
    return {name: task.examples(job, name) for name, is_read in wanted if is_read}


@dataclass(frozen=True)
class Room:
    """The memory that there is for a run."""

    free_bytes: int | None
    """What its process may hold in all; None: the system does not say."""
    unheld_bytes: int
    """Addresses that the process takes and holds no memory at, which count for a limit on them."""


def room(args: TrainingArguments) -> Room:
    """Return the room for a run that begins in place of this process, which then has no limit on its addresses.

    Or as high a limit as it may set itself: a rehearsal takes addresses, and no memory behind them. Ranks that are
    planned on this machine have equal parts of what is available.
    """
    torch.ones(1 << 16).add_(1)  # starts the threads, whose stacks are mapped
    unheld = memory.unheld_bytes() + _ARENA_BYTES * (torch.get_num_threads() + _OTHER_THREADS)
    held = memory.resident_bytes() or 0
    free = memory.free_bytes(
        held_bytes=held, unheld_bytes=unheld, limit_gb=args.memory_limit_gb, n_processes=args.world_size
    )
    memory.lift_address_limit()
    return Room(free, unheld)


def forecast(
    task: Task,
    job: Any,
    args: TrainingArguments,
    free_bytes: int | None,
    examples: Mapping[str, Any] | None = None,
    held_bytes: int | None = None,
) -> Forecast:
    """Return what this run will take. It reads the data and the sizes of the model's weights, and writes nothing.

    `free_bytes` is what there is for it. `held_bytes` is that of the forecast of another run of the same task: since
    then this process has grown.
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
    return of_run(run, args.precision, optimizer, held, rehearsal, free_bytes)


def rates_for(args: TrainingArguments, say: Callable[[str], None], report: str | None = None) -> Rates | None:
    """Return the rates of the machine in the report of whet doctor, or of this one, which may be measured first.

    None, and why it is so, if the report has none, if the run here would use a GPU, or if nothing can be measured, as
    where memory is short.
    """
    if report is not None:
        found = known_rates.of_report(Path(report))
        if found is None:
            say(f"no time: {report} has no rates; run on that machine: whet doctor --rates --json")
        return found
    if weights.device_of(args.use_cpu).type != "cpu":
        say("no time: what a GPU does in a second is not measured")
        return None
    try:
        return known_rates.of_this_machine(say)
    except WhetError as error:
        say(f"no time: {error.problems[0].what}: {error.problems[0].got}")
        return None
