"""A run that is only planned: data and settings are those of the run, the weights have sizes and no values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet.config.arguments import TrainingArguments
from whet.engine.forecast import Forecast, of_run
from whet.engine.update import build_optimizer
from whet.errors import ConfigError, WhetError
from whet.hardware import cpu, memory, trim
from whet.jobs.splits import SPLITS
from whet.jobs.task import Task
from whet.log import logger
from whet.plan import rates as known_rates
from whet.plan.rates import Rates
from whet.plan.rehearsal import Rehearsal
from whet.store import weights

_LATER_BYTES = 110 << 20
"""What a process holds more at its peak than a plan of its run: modules that are imported later, those of the report
among them, and memory of the preparation that does not fit what comes. Fitted to runs (`benchmarks/plan/run.py`)."""
_OTHER_OPERATORS, _OTHER_PROCESSOR = 0.3, 0.1
"""The share by which memory may be another with other operators, and on another processor with the same ones: formats
of its products have copies of weights or not. Estimated, not measured."""
_ARENA_BYTES, _OTHER_THREADS = 128 << 20, 3
"""Addresses that glibc takes for each thread that allocates; next to those that compute some prepare and save."""


def examples_of(task: Task, job: Any, args: TrainingArguments) -> dict[str, Any]:
    """Return the examples that this run trains on, evaluates and predicts, by split."""
    return {name: task.examples(job, name) for name, split in SPLITS.items() if getattr(args, split.asked_by)}


def free_for(args: TrainingArguments) -> int | None:
    """Return what a run may hold in all that begins in place of this process; None: the system does not say.

    This process then has no limit on its addresses, or as high a one as it may set itself: a rehearsal takes addresses,
    and no memory behind them. Ranks that are planned on this machine have equal parts of what is available.
    """
    torch.ones(1 << 16).add_(1)  # starts the threads, whose stacks are mapped
    unheld = memory.unheld_bytes() + _ARENA_BYTES * (torch.get_num_threads() + _OTHER_THREADS)
    held = memory.resident_bytes() or 0
    free = memory.free_bytes(
        held_bytes=held, unheld_bytes=unheld, limit_gb=args.memory_limit_gb, n_processes=args.world_size
    )
    memory.lift_address_limit()
    return free


def forecast(
    task: Task,
    job: Any,
    args: TrainingArguments,
    free_bytes: int | None,
    examples: Mapping[str, Any] | None = None,
    held_bytes: int | None = None,
) -> Forecast:
    """Return what this run will take on a CPU. It reads the data and the sizes of the weights, and writes nothing.

    Raises ConfigError for a run that would take a GPU. `free_bytes` is what there is for it. `held_bytes` is that of
    the forecast of another run of the same task: since then this process has grown.
    """
    if (device := weights.device_of(args.use_cpu).type) != "cpu":
        raise _on_a_gpu(device)
    examples = examples_of(task, job, args) if examples is None else examples
    if args.torch_compile:  # a graph cannot be traced over weights without values
        logger.warning("the forecast is that of blocks which are not compiled")
        args = replace(args, torch_compile=False, torch_compile_backend=None, torch_compile_mode=None)
    rehearsal = Rehearsal()
    with rehearsal:
        begun = task.begin(job, args, examples)
        run = begun.engine.planned()
        optimizer, _ = build_optimizer(run.model, run.args, run.plan.n_steps)
    if trim.why_not() is None:
        trim.trim()()
    held = (memory.resident_bytes() or 0) + _LATER_BYTES if held_bytes is None else held_bytes
    tested = begun.parts["test"].rows if "test" in begun.parts else None
    found = of_run(run, args.precision, optimizer, held, rehearsal, free_bytes, tested)
    return replace(found, workload=replace(found.workload, n_seeds=job.seeds))


def there(found: Forecast, report: Path) -> Forecast:
    """Return a forecast that was made here as that of the machine with this report of whet doctor.

    Its passes were rehearsed with the operators and on the processor of this machine. Where the other one differs, the
    range of the memory is wider, and the reasons are named.
    """
    doubts, error = _differences(json.loads(report.read_text("utf-8")))
    return replace(found, memory=replace(found.memory, doubts=doubts, error_frac=error))


def _differences(report: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """Return why memory may be another on the machine of a report, and by which share."""
    here, machine, native = known_rates.key_here(), report.get("machine") or {}, report.get("native") or {}
    by_library = "torch" if native.get("asked_kernels") == "reference" else native.get("isa") or "torch"
    key = (report.get("training_rates") or {}).get("key") or ({"operators": by_library} if native else {})
    processor, operators = key.get("processor") or machine.get("processor"), key.get("operators")
    found: dict[str, float] = {}
    if operators not in (None, here.operators):
        text = f"memory was rehearsed with the operators here ({here.operators}), and that machine runs {operators}"
        found[text] = _OTHER_OPERATORS
    if processor not in (None, here.processor):
        found[f"memory was rehearsed on {here.processor}, and that machine has {processor}"] = _OTHER_PROCESSOR
    elif machine.get("instruction_sets") not in (None, cpu.instruction_sets()[0]):
        found["memory was rehearsed here, and that machine has other instruction sets"] = _OTHER_PROCESSOR
    return tuple(found), math.hypot(*found.values())


def rates_for(say: Callable[[str], None], report: str | None = None) -> Rates | None:
    """Return the rates of the machine in the report of whet doctor, or of this one, which may be measured first.

    None, and why it is so, if the report has none, or if nothing can be measured, as where memory is short.
    """
    if report is not None:
        found = known_rates.of_report(Path(report))
        if found is None:
            say(f"no time: {report} has no rates; run on that machine: whet doctor --rates --json")
        return found
    try:
        return known_rates.of_this_machine(say)
    except WhetError as error:
        say(f"no time: {error.problems[0].what}: {error.problems[0].got}")
        return None


def _on_a_gpu(device: str) -> ConfigError:
    return ConfigError(
        what="whet forecasts trainings on CPUs",
        got=f"this run is on a GPU ({device})",
        why="memory and time are those of a processor's operators, and nothing is known of a GPU's",
        fix="add --use_cpu to forecast it on this machine's processor, or use whet plan with --hardware for another "
        "machine; on a GPU, --auto_find_batch_size true finds the rows that fit",
    )
