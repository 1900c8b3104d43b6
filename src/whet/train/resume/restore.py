"""Resumes a run from a checkpoint: bitwise as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.config.rules.saving import METRIC_FIELDS
from whet.errors import StorageError
from whet.log import logger
from whet.precision import policy
from whet.train.checkpoint import best, content, manifest, optimizer_state, weights
from whet.train.checkpoint import folder as checkpoint
from whet.train.resume import compare, form_1, kinds
from whet.train.state import State, put_back

if TYPE_CHECKING:
    from whet.train.loop import Fit

_AFTER_WEIGHTS = ("optimizer", "schedule")
_COUNTERS = (
    "global_step", "epoch", "log_history", "total_flos", "best_metric", "best_global_step",
)  # fmt: skip


def folder_to_resume(asked: str | bool | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that is meant: None for none, or where "auto" finds no checkpoint at all."""
    if not asked or asked == "no":
        return None
    if asked is not True and asked != "auto":
        return checkpoint.require_good(Path(str(asked)))
    found = checkpoint.newest(output_dir)
    if found is None:
        logger.info("there is no checkpoint in %s: the run starts at its first step", output_dir)
    return found


def look_ahead(args: TrainingArguments) -> None:
    """Raise what is wrong with the settings of a run that goes on, as far as it shows without a model and its data.

    The checkpoint is only glanced at, so one that is damaged is not told here.
    """
    asked = args.resume_from_checkpoint
    if not args.do_train or not asked:
        return
    folders = checkpoint.every(Path(args.output_dir)) if asked == "auto" else [Path(str(asked))]
    folder = next((one for one in reversed(folders) if not checkpoint.problems_of(one, light=True)), None)
    if folder is not None:
        with _readable(folder):
            compare.require_same_settings(args, folder)


def precision_of(folder: Path) -> str:
    """Return the precision that the checkpoint's run computes in: what `auto` came to."""
    with _readable(folder):
        return policy.in_checkpoint(_read(folder / compare.ARGUMENTS))


def restore(fit: Fit, folder: Path) -> None:
    """Put back what was saved; raises ConfigError if model, data or settings would change the curve."""
    fit.saver.resume(folder)
    with _readable(folder):
        changed = compare.require_same(fit, folder)
        parts = fit.parts(changed)
        saved = _saved_parts(fit, folder)
        first = {name: part for name, part in parts.items() if name not in _AFTER_WEIGHTS}
        state = _trainer_state(folder)
        put_back(first, saved)
        weights.load_weights(fit.trainer.model, folder)
        put_back({name: parts[name] for name in _AFTER_WEIGHTS}, saved)
        for name in _COUNTERS:
            setattr(fit.state, name, getattr(state, name))
        if changed & {*METRIC_FIELDS}:  # the best by another metric is no measure
            fit.state.best_metric, fit.state.best_global_step, state.best_model_checkpoint = None, None, None
        best.take_over(fit, state.best_model_checkpoint, folder)
    fit.loader.open()  # reads rows: errors of the data set are not those of the folder
    logger.info("resuming after step %d from %s", fit.state.global_step, folder)


def _saved_parts(fit: Fit, folder: Path) -> dict[str, State]:
    if content.form_of(folder) == 1:
        names = optimizer_state.names_in(fit.optimizer, fit.trainer.model)
        return form_1.read(folder, names, fit.args.train_rows_per_step)
    return content.read(folder)


def _trainer_state(folder: Path) -> TrainerState:
    """Return the counters; raises ValueError for those of another kind, or of another step, than a run writes."""
    state = _read(folder / content.TRAINER_STATE)
    kinds.require_kinds(state, kinds.TRAINER_STATE, content.TRAINER_STATE)
    step = (manifest.facts_of(folder) or {}).get("step")
    kinds.require_step(state.get("global_step"), step, content.TRAINER_STATE)
    return TrainerState.load_from_json(str(folder / content.TRAINER_STATE))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Tell of a folder that verifies and yet does not hold what whet writes."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(
            what=f"{folder} does not fit this run",
            got=f"{type(error).__name__}: {error}",
            why="the files are intact, but belong to a different model or optimizer, or another program changed them",
            fix="name another checkpoint in --resume_from_checkpoint; or start a new run: leave "
            "--resume_from_checkpoint out and use another --output_dir",
        ) from error


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
