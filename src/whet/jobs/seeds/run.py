"""`--seeds N`: the same run with N seeds, one after the other; the best model is the result, the spread is reported.

Each seed trains in `seed-S` of the output folder, as a normal run with `--seed S` would. A seed that has finished
leaves a record there; a run that resumes takes its metrics from it. The files of the best seed are copied to the output
folder at the end.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.ranks import require_one_process
from whet.errors import WhetError
from whet.jobs.places import may_hold_files, require_places
from whet.jobs.seeds import files
from whet.jobs.task import Task
from whet.train.control import lock, stop
from whet.train.output import printing, run_log
from whet.train.sync import OneRank

_AGAIN = {"resume_from_checkpoint": "auto"}


@dataclass(frozen=True)
class Result:
    """What one seed reached."""

    seed: int
    metrics: Mapping[str, float]
    lines: Sequence[str]
    """The lines that follow the table at the end of its run."""


def run_seeds(task: Task, job: Any, args: TrainingArguments, examples: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Train every seed that has not finished; return all metrics of the best one with the spread, and lines for people.

    Raises Stopped if a signal comes; the same command with `--resume_from_checkpoint auto` then resumes.
    """
    require_one_process("--seeds")
    settings = files.settings_of(job, args)
    chosen_by: tuple[str, bool] | None = None
    folders = {seed: Path(args.output_dir) / f"seed-{seed}" for seed in range(args.seed, args.seed + job.seeds)}
    resumes = args.resume_from_checkpoint is not None
    known = {seed: files.read(folder, settings, args) if resumes else None for seed, folder in folders.items()}
    precision = next((found["precision"] for found in known.values() if found is not None), args.precision)
    results: list[Result] = []
    for n, (seed, folder) in enumerate(folders.items(), start=1):
        record = known[seed]
        printing.show([f"seed {seed} ({n} of {job.seeds}){', trained before' if record else ''}"])
        if record is None:
            own = replace(args, seed=seed, output_dir=str(folder), precision=precision)
            with _stops_with(f"{n - 1} of {job.seeds} seeds are trained"):
                earlier = "the first seed" if args.precision == "auto" != precision else ""
                record = _train(task, job, own, examples, earlier) | {"seed": seed, "settings": settings}
                chosen_by = chosen_by or task.best_by(record["metrics"], args)
                files.write(folder, record)
            precision = record["precision"]
        results.append(Result(seed, record["metrics"], record["lines"]))
        with _stops_with(f"{n} of {job.seeds} seeds are trained"):
            stop.check(OneRank().stop_signal)
    return _finish(args, chosen_by or task.best_by(results[0].metrics, args), results)


def _train(
    task: Task, job: Any, args: TrainingArguments, examples: Mapping[str, Any], auto_as_in: str
) -> dict[str, Any]:
    """Return the record of a seed that has been trained and judged, in the precision that `auto_as_in` chose."""
    require_places(job, args)
    with lock.output_folder(args.output_dir, may_hold_files(args)) as folder:
        files.remove(folder)
        prepared = task.prepare(job, args, examples)
        prepared.trainer.precision.auto_as_in = auto_as_in
        metrics = prepared.run()
    lines, precision = list(task.tables(prepared)), prepared.trainer.precision.name
    del prepared
    gc.collect()  # the model and its trainer refer to each other
    return {"metrics": metrics, "lines": lines, "precision": precision}


def _finish(args: TrainingArguments, best_by: tuple[str, bool], results: Sequence[Result]) -> tuple[Any, list[str]]:
    """Copy the files of the best seed to the output folder, and return its metrics with the spread of all."""
    name, greater = best_by
    known = [one for one in results if not math.isnan(one.metrics[name])] or results
    best = (max if greater else min)(known, key=lambda one: one.metrics[name])
    folder = Path(args.output_dir)
    files.copy(folder / f"seed-{best.seed}", folder)
    spread = {
        f"{metric}_{word}": value
        for metric in _judged(results)
        for word, value in _spread([one.metrics[metric] for one in results]).items()
    }
    metrics = dict(best.metrics) | spread | {"seeds": len(results), "best_seed": best.seed}
    with run_log.written_to(folder):
        files.write_results(folder, metrics, {one.seed: dict(one.metrics) for one in results}, name)
    return metrics, [*_table(name, best, results, spread), *best.lines]


def _judged(results: Sequence[Result]) -> list[str]:
    """Return the metrics of evaluation and prediction that are no speeds or counts."""
    speeds = ("runtime", "per_second", "samples", "left_out")
    return [
        name
        for name, value in results[0].metrics.items()
        if name.startswith(("eval_", "predict_")) and not name.endswith(speeds) and isinstance(value, int | float)
        and all(name in one.metrics for one in results)
    ]  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation (of a sample, as five seeds are one)."""
    return {"mean": fmean(values), "std": stdev(values)}


def _table(name: str, best: Result, results: Sequence[Result], spread: Mapping[str, float]) -> list[str]:
    rows = [
        f"  {f'seed {one.seed}':<24}{one.metrics[name]:.4f}{'  best: its model is kept' if one is best else ''}"
        for one in results
    ]
    words = name.removeprefix("eval_")
    of_all = {"mean": name, "mean, test": f"predict_{words}"}
    means = [
        f"  {label:<24}{spread[f'{metric}_mean']:.4f}, standard deviation {spread[f'{metric}_std']:.4f}"
        for label, metric in of_all.items()
        if f"{metric}_mean" in spread
    ]
    return [f"{words} of {len(results)} seeds", *rows, *means]


@contextmanager
def _stops_with(done: str) -> Iterator[None]:
    """Have whatever ends the block name the command that resumes all seeds, not one of them."""
    stop.record_progress(done, **_AGAIN)
    try:
        yield
    except stop.Stopped as stopped:
        raise stop.Stopped(f"{stopped}; {done}", _AGAIN, int(str(stopped.code))) from None
    except WhetError as error:
        if error.again:
            error.again = _AGAIN
        raise
    finally:
        stop.record_progress(done, **_AGAIN)
