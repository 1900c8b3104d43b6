"""The demonstration of a task: a training on data that ships with whet.

An interrupted demo continues in its folder, and a finished one begins again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from whet import log, report
from whet.config.arguments import TrainingArguments
from whet.config.rules.training import NOT_COUNTED
from whet.errors import ConfigError, WhetError
from whet.jobs.run import name_outputs, show
from whet.jobs.task import Task
from whet.store import find, manifest, write
from whet.watch import files as output_files
from whet.watch import lock, run_log, stop

DATA = Path(str(files("whet.jobs"))) / "demo_data"
"""Questions about texts, in SQuAD's form: the files that demos train on, are judged by, and show."""
_ARGUMENTS = "training_args.json"
"""The settings of a training, in its folder and in its checkpoints."""
_FIXED = ("per_device_train_batch_size", "learning_rate", "warmup_ratio", "warmup_steps", "logging_steps")
"""Settings that every run of a demo has: a folder with others holds somebody's training."""
_OF_A_RUN = ("seed", "num_train_epochs", "max_steps")
"""Settings of a demo that its user gives."""


def demo_arguments(demo: Any, **own: Any) -> TrainingArguments:
    """Return the settings of a demo with this folder and seed: those that each one has, and its own."""
    return TrainingArguments(
        output_dir=demo.output_dir,
        seed=demo.seed,
        overwrite_output_dir=True,
        do_train=True,
        do_eval=True,
        eval_on_start=True,
        save_strategy="time",
        save_total_limit=1,
        **own,
    )


def run_demo(
    task: Task,
    job: Any,
    args: TrainingArguments,
    *,
    marker: str,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[Any, dict[str, float]], None],
) -> int:
    """Train the task on the demo's data in its folder, and show what it reached; return the exit code.

    `marker` is the file that the demo writes first. `begin` makes what a demo needs that does not continue; `end` shows
    the trained model, from the TaskRun that has run and its metrics.
    """
    log.set_up(logging.WARNING)
    started_s = time.perf_counter()
    name_outputs(Path(args.output_dir))
    taken = lock.output_folder(args.output_dir, overwrite=True)
    with taken as folder, run_log.buffered(), _continuing(folder, marker, args) as args:
        if args.resume_from_checkpoint is None:
            begin()
        examples = {name: task.examples(job, name) for name in ("train", "validation")}
        begun = task.begin(job, args, examples)
        with report.written_after(folder):
            metrics = begun.run()
            stop.mark_work_done()
            print()
            show(task.table, metrics, folder, time.perf_counter() - started_s)
        end(begun, metrics)
    return 0


@contextmanager
def _continuing(folder: Path, marker: str, args: TrainingArguments) -> Iterator[TrainingArguments]:
    """Yield the settings of the demo in this folder: if one was interrupted there, they continue it.

    Raises ConfigError if the folder contains anything but the files of an earlier demo. A demo that comes to its end
    removes its checkpoints; one that is stopped says that the same command continues it.
    """
    is_finished = _require_own(folder, marker, args)
    checkpoint = None if is_finished else _interrupted(folder, args)
    _mark(folder / marker, args, is_finished=False)
    if checkpoint is not None:
        step = (manifest.facts_of(checkpoint) or {}).get("step", 0)
        print(f"Continues the demo that was interrupted in {folder}, after step {step}.\n", flush=True)
        args = replace(args, resume_from_checkpoint=str(checkpoint))
    try:
        yield args
    except stop.Stopped as stopped:
        raise stop.Stopped(f"{stopped.what}; the same command continues the demo", {}, int(str(stopped.code))) from None
    except ConfigError as error:
        if checkpoint is None:
            raise
        raise ConfigError(
            what=f"the demo in {folder} cannot be continued",
            got=error.problems[0].what,
            why="its checkpoint was written with other data, another model or another version",
            fix=f"remove {folder}, or use another --output_dir",
        ) from error
    write.remove_all(folder)
    _mark(folder / marker, args, is_finished=True)


def _mark(path: Path, args: TrainingArguments, *, is_finished: bool) -> None:
    facts = {"finished": is_finished, "settings": _settings(args, _FIXED)}
    output_files.write_json(path, facts, indent=2, on_error="stop")


def _settings(args: TrainingArguments, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _require_own(folder: Path, marker: str, args: TrainingArguments) -> bool:
    """Return whether no demo was interrupted in the folder; raises ConfigError if it holds somebody's work.

    That are checkpoints which no interrupted demo has written, and a training of other settings.
    """
    names = set(os.listdir(folder)) - NOT_COUNTED  # noqa: PTH208 - only the names are asked for
    marked = _content(folder / marker)
    is_finished, settings = marked.get("finished") is not False, marked.get("settings")
    wanted = settings if isinstance(settings, dict) else _settings(args, _FIXED)  # another version has others
    saved = [name for name in names if name.startswith(("checkpoint-", "abandoned-"))]
    trained = [folder / _ARGUMENTS, *(folder / name / _ARGUMENTS for name in saved)]
    own = marker in names and not (is_finished and saved) and all(_has(path, wanted) for path in trained)
    if names and not (own and all((folder / name / _ARGUMENTS).exists() for name in saved)):
        raise ConfigError(
            what="output_dir is not empty",
            got=str(folder),
            why="it holds files that are not of a demo, and the demo would replace some of them",
            fix="use another --output_dir, or empty this one",
        )
    return is_finished


def _interrupted(folder: Path, args: TrainingArguments) -> Path | None:
    """Return the checkpoint from which a demo with these settings continues; None if it has to begin again."""
    try:
        checkpoint = find.newest(folder)
        if checkpoint is None or not _has(checkpoint / _ARGUMENTS, _settings(args, _OF_A_RUN)):
            return None
        from whet.store import compare  # which loads torch

        compare.require_same_settings(args, checkpoint)
    except WhetError:  # every checkpoint is damaged, or another version has other settings: a demo may begin again
        return None
    return checkpoint


def _has(path: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the training of this file had these settings, or there was none."""
    if not path.exists():
        return True
    kept = _content(path)
    return all(name in kept and kept[name] == value for name, value in settings.items())


def _content(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
