"""The command of a task: problems are reported before torch is loaded, then come the work and the summary.

With several seeds, each trains a model, the best one is kept, and the results have the spread of all.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from whet import json_output, log, report
from whet.config.arguments import TrainingArguments
from whet.config.ranks import require_one_process, require_output_for_restarts
from whet.config.rules.training import LOCK_NAME, LOG_NAME, OLDER_LOG_NAME, RECORD_NAME, REPORT_NAME
from whet.config.settings import refuse
from whet.errors import ConfigError, WhetError
from whet.hardware import memory
from whet.jobs import hub_upload
from whet.jobs.fields import JobFields
from whet.jobs.places import logging_dir_in, may_be_started_again_in, may_hold_files, require_places
from whet.jobs.splits import SPLITS
from whet.jobs.task import Shown, Task
from whet.store import find
from whet.watch import files as output_files
from whet.watch import lock, printing, results, run_log, stop, table


def _continued(args: TrainingArguments) -> TrainingArguments:
    """Return the settings of a command that its launcher may have started again: it resumes where it was."""
    require_output_for_restarts(overwrites=args.do_train and args.overwrite_output_dir)
    return resumed(args) if args.do_train else args


def resumed(args: TrainingArguments) -> TrainingArguments:
    """Return the settings with the checkpoint that a command resumes from if it may have been started again."""
    begins = args.overwrite_output_dir or not may_be_started_again_in(Path(args.output_dir))
    if begins and not args.resume_from_checkpoint:
        return args  # torchrun also starts a command again that was refused for the files of another run
    asked = find.resumes_from(args.resume_from_checkpoint, Path(args.output_dir))
    return args if asked == args.resume_from_checkpoint else replace(args, resume_from_checkpoint=asked)


@contextmanager
def _saying_what_is_kept(args: TrainingArguments) -> Iterator[None]:
    """Have the error of a run that memory or threads run out for name the newest checkpoint, and how to resume."""
    try:
        yield
    except Exception as error:
        lack = None if isinstance(error, WhetError) or not args.do_train else memory.lack(error)
        if lack is None:
            raise
        from whet.store import write

        with suppress(OSError):
            own = not args.overwrite_output_dir or bool(args.resume_from_checkpoint) or stop.has_step_done()
            if own and (newest := find.newest_complete(Path(args.output_dir))):
                lack = write.resumable(lack, newest, {"resume_from_checkpoint": "auto"})
        raise lack from error


def show(shown: Shown, metrics: Mapping[str, float], folder: Path, total_s: float, lines: Sequence[str] = ()) -> None:
    """Print what the run reached, how fast, and where its files are: the table at its end, and these lines."""
    json_output.add(metrics=metrics)
    with run_log.written_to(folder):
        printing.show([*table.lines(shown, metrics, folder, total_s), *lines])


def name_outputs(folder: Path) -> None:
    """Have the JSON object of a run name its folder, and of the files to read on those that the run writes."""
    names = {"results": results.ALL, "errors": results.ERRORS["eval"], "report": REPORT_NAME, "record": RECORD_NAME}
    json_output.add_outputs(folder=folder)
    json_output.may_write(**{word: folder / name for word, name in names.items()})


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
    name_outputs(Path(args.output_dir))
    asked, choice, recorded, upload = args, None, nullcontext(), None
    if job.auto:
        from whet.jobs.trial_processes import ordered, serve

        if (order := ordered()) is not None and order["do"] != "run":
            return serve(order, task, job, args)
    if args.push_to_hub and not job.dry_run:
        upload = hub_upload.begin(args, job)
    if job.auto:
        from whet.jobs import auto

        args, choice = auto.chosen(task, job, args)
        json_output.add(auto=None if choice is None else choice.as_json())
        recorded = auto.recorded(choice, args, asked)
    if job.dry_run:
        return _show_forecast(task, job, args)
    started_s = time.perf_counter()
    kept, taken = _saying_what_is_kept(args), lock.output_folder(args.output_dir, may_hold_files(args))
    reports = job.report_html and args.should_save
    reported = report.written_after(Path(args.output_dir)) if reports else nullcontext()
    with kept, taken as folder, nullcontext() if upload is None else closing(upload):
        if args.should_save:
            hub_upload.remove_staged(folder)  # of a run that was killed
        with reported, run_log.buffered(), recorded:
            wanted = [name for name, split in SPLITS.items() if getattr(args, split.asked_by)]
            examples = {name: task.examples(job, name) for name in wanted}
            if job.seeds > 1:
                metrics, lines = run_seeds(task, job, args, examples, choice)
            else:
                begun = task.begin(job, args, examples)
                if choice is not None:
                    begun.chosen = choice.as_json()
                    how = "" if args.precision == asked.precision else "the trials of --auto"
                    begun.engine.precision.chosen_in(how)
                if upload is not None:
                    begun.uploads_by(upload)
                metrics, lines = begun.run(), task.lines(begun)
            stop.mark_work_done()
            show(task.table, metrics, folder, time.perf_counter() - started_s, lines)
        if upload is not None:  # all files are written, the report too
            printing.show([upload.finish()])
    return 0


def _show_forecast(task: Task, job: Any, args: TrainingArguments) -> int:
    from whet.jobs.dry_run import forecast, free_for, rates_for
    from whet.plan import seconds
    from whet.plan import show as shown

    found = forecast(task, job, args, free_for(args))
    rates = rates_for(lambda text: printing.show([text]))
    printing.show(shown.table(found.anatomy, found.workload, found.memory))
    json_output.add(task=task.name, memory=found.memory.as_json())
    if rates is not None:
        sizes = (rates, found.anatomy, found.workload)
        took, costs = seconds.forecast(*sizes), seconds.prices(*sizes)
        printing.show(["", *seconds.table(rates, took, costs)])
        json_output.add(time=took.as_json() | {"prices": [asdict(price) for price in costs]})
    return 0


RECORD = "seed_finished.json"
_OWN = {RECORD, LOCK_NAME, LOG_NAME, OLDER_LOG_NAME, RECORD_NAME, REPORT_NAME}
"""Files of a seed that say nothing about its model."""
_FREE = {
    "seeds", "report_html", "auto", "auto_budget_s", "auto_ranks", "auto_again", "token", "cache_dir",
    "overwrite_cache", "preprocessing_num_workers", *(one.file for one in SPLITS.values()),
}  # fmt: skip
"""Settings of a task that may change between a seed and the next; files are compared by their content."""
_LENGTH = ("num_train_epochs", "min_steps", "max_steps")


def _settings_of(job: JobFields, args: TrainingArguments) -> dict[str, Any]:
    """Return what all seeds have in common, and a resumed run must have too."""
    from whet.data.files.file_bytes import contents

    asked = asdict(job)
    task = {name: value for name, value in asked.items() if name not in _FREE}
    found = task | {name: getattr(args, name) for name in _LENGTH} | contents(asked)
    return json.loads(json.dumps(found))  # in the form that the record gives back


def _read_record(folder: Path, settings: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any] | None:
    """Return the record of a seed that has finished, None if it has not; ConfigError if it had other settings."""
    from whet.jobs.used_again import holds_model

    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        before = record["settings"]
        complete = {"metrics", "lines", "precision"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not complete or not (folder / "config.json").is_file():
        return None
    if not holds_model(folder):
        printing.show([f"{folder.name} has no weights any more, and is trained again"])
        return None
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise ConfigError(
            what=f"{folder.name} was trained with other settings or data: {', '.join(changed)}",
            got="; ".join(f"{name}: {before.get(name)} then, {settings[name]} now" for name in changed),
            why="the seeds of a run are compared, so they differ in nothing else",
            fix="use the settings and data of the first seed, or another --output_dir without --resume_from_checkpoint",
        )
    from whet.store.compare import require_same_settings

    require_same_settings(replace(args, seed=int(record["seed"])), folder)
    return record


def _write_results(folder: Path, metrics: Mapping[str, Any], seeds: Mapping[int, Mapping[str, Any]], by: str) -> None:
    """Write the metrics of the best seed with the spread (all_results.json), and those of every seed (seeds.json)."""
    results.save(str(folder), "all", metrics, combined=False)
    each = {f"seed-{seed}": {name: _plain(value) for name, value in own.items()} for seed, own in seeds.items()}
    summary = {"chosen_by": by, "best": f"seed-{metrics['best_seed']}", "metrics": each}
    output_files.write_json(folder / results.SEEDS, summary, indent=2, on_error="stop")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_AGAIN = {"resume_from_checkpoint": "auto"}


@dataclass(frozen=True)
class Result:
    """What one seed reached."""

    seed: int
    metrics: Mapping[str, float]
    lines: Sequence[str]
    """The lines that follow the table at the end of its run."""


def run_seeds(
    task: Task, job: Any, args: TrainingArguments, examples: Mapping[str, Any], choice: Any = None
) -> tuple[Any, list[str]]:
    """Train every seed that has not finished; return all metrics of the best one with the spread, and lines for people.

    Raises Stopped if a signal comes; the same command with `--resume_from_checkpoint auto` then resumes.
    """
    from whet.engine.sync import Sync

    require_one_process("--seeds")
    settings = _settings_of(job, args)
    chosen_by: tuple[str, bool] | None = None
    folders = {seed: Path(args.output_dir) / f"seed-{seed}" for seed in range(args.seed, args.seed + job.seeds)}
    resumes = args.resume_from_checkpoint is not None
    known = {seed: _read_record(folder, settings, args) if resumes else None for seed, folder in folders.items()}
    precision = next((found["precision"] for found in known.values() if found is not None), args.precision)
    found: list[Result] = []
    for n, (seed, folder) in enumerate(folders.items(), start=1):
        record = known[seed]
        printing.show([f"seed {seed} ({n} of {job.seeds}){', trained before' if record else ''}"])
        if record is None:
            places = {"output_dir": str(folder), "logging_dir": logging_dir_in(args, folder.name)}
            own = replace(args, seed=seed, precision=precision, **places)
            with _stops_with(f"{n - 1} of {job.seeds} seeds are trained"):
                earlier = "the first seed" if args.precision == "auto" != precision else ""
                record = _train(task, job, own, examples, earlier, choice) | {"seed": seed, "settings": settings}
                chosen_by = chosen_by or task.best_by(record["metrics"], args)
                output_files.write_json(folder / RECORD, record, indent=2, on_error="stop")
            precision = record["precision"]
        found.append(Result(seed, record["metrics"], record["lines"]))
        with _stops_with(f"{n} of {job.seeds} seeds are trained"):
            stop.check(Sync().stop_signal)
    return _finish(args, chosen_by or task.best_by(found[0].metrics, args), found)


def _train(
    task: Task, job: Any, args: TrainingArguments, examples: Mapping[str, Any], auto_as_in: str, choice: Any
) -> dict[str, Any]:
    """Return the record of a seed that has been trained and judged, in the precision that `auto_as_in` chose."""
    from whet.jobs.used_again import UsedAgain

    require_places(job, args)
    with lock.output_folder(args.output_dir, may_hold_files(args)) as folder:
        (folder / RECORD).unlink(missing_ok=True)
        begun = task.begin(job, args, examples)
        begun.engine.events.add_callback(UsedAgain(Path(args.output_dir).parent).after_first_step())
        begun.engine.precision.chosen_in(auto_as_in)
        begun.chosen = None if choice is None else choice.as_json()
        metrics = begun.run()
    lines, precision = task.lines(begun), begun.engine.precision.name
    del begun
    gc.collect()  # the model and its trainer refer to each other
    return {"metrics": metrics, "lines": lines, "precision": precision}


def _finish(args: TrainingArguments, best_by: tuple[str, bool], found: Sequence[Result]) -> tuple[Any, list[str]]:
    """Copy the files of the best seed to the output folder, and return its metrics with the spread of all."""
    name, greater = best_by
    known = [one for one in found if not math.isnan(one.metrics[name])] or found
    best = (max if greater else min)(known, key=lambda one: one.metrics[name])
    folder = Path(args.output_dir)
    results.forget(folder)
    output_files.copy_model(folder / f"seed-{best.seed}", folder, leave_out=_OWN)
    spread: dict[str, float] = {}
    for metric in _judged(found):
        values = [one.metrics[metric] for one in found]
        is_finite = all(map(math.isfinite, values))
        spread[f"{metric}_mean"] = fmean(values) if is_finite else math.nan
        spread[f"{metric}_std"] = stdev(values) if is_finite else math.nan  # of a sample, as five seeds are one
    metrics = dict(best.metrics) | spread | {"seeds": len(found), "best_seed": best.seed}
    with run_log.written_to(folder):
        _write_results(folder, metrics, {one.seed: dict(one.metrics) for one in found}, name)
    return metrics, [*_table(name, best, found, spread), *best.lines]


def _judged(found: Sequence[Result]) -> list[str]:
    """Return the metrics of evaluation and prediction that are no speeds or counts."""
    speeds = ("runtime", "per_second", "samples", "left_out", "_judged", "_listed")
    return [
        name
        for name, value in found[0].metrics.items()
        if name.startswith(("eval_", "predict_")) and not name.endswith(speeds) and isinstance(value, int | float)
        and all(name in one.metrics for one in found)
    ]  # fmt: skip


def _table(name: str, best: Result, found: Sequence[Result], spread: Mapping[str, float]) -> list[str]:
    rows = [
        f"  {f'seed {one.seed}':<24}{one.metrics[name]:.4f}{'  best: its model is kept' if one is best else ''}"
        for one in found
    ]
    words = name.removeprefix("eval_")
    of_all = {"mean": name, "mean, test": f"predict_{words}"}
    means = [
        f"  {label:<24}{spread[f'{metric}_mean']:.4f}, standard deviation {spread[f'{metric}_std']:.4f}"
        for label, metric in of_all.items()
        if f"{metric}_mean" in spread
    ]
    return [f"{words} of {len(found)} seeds", *rows, *means]


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
