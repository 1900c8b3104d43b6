"""Which evaluation of a run was the best, and going back to it at the end."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.train.checkpoint import folder as checkpoint
from whet.train.checkpoint import weights
from whet.train.checkpoint.lineage import Line

if TYPE_CHECKING:
    from whet.train.loop import Fit


def is_better(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Return whether these metrics beat the best so far, and remember them if so."""
    wanted = args.metric_for_best_model
    if wanted is None:
        return False
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if name not in metrics:
        raise _unknown_metric(wanted, metrics)
    sign = 1.0 if args.greater_is_better else -1.0
    best = state.best_metric
    if math.isnan(metrics[name]) or (best is not None and sign * metrics[name] <= sign * best):
        return False
    state.best_metric, state.best_global_step = metrics[name], state.global_step
    state.best_model_checkpoint = None  # until this one is saved
    return True


def as_saved(state: TrainerState) -> dict[str, Any]:
    """Return the state as files hold it: the best checkpoint is a name in the folder, wherever that folder moves to."""
    best = state.best_model_checkpoint
    return dataclasses.asdict(state) | {"best_model_checkpoint": Path(best).name if best else None}


def take_over(fit: Fit, saved: str | None, folder: Path) -> None:
    """Find the best checkpoint that the state in `folder` names, among those of this run's line.

    Only its name counts. One that lies next to `folder`, outside the output folder, is copied into it if the run is to
    end with it. Raises StorageError if the run is to end with it and it is not there.
    """
    output_dir, wanted = Path(fit.args.output_dir), fit.args.load_best_model_at_end
    name = Path(saved).name if saved else None
    found = checkpoint.find(name, fit.saver.line, [output_dir]) if name else None
    if name and wanted and not found:
        beside = checkpoint.find(name, fit.saver.line, [folder.resolve().parent])
        if beside is None:
            raise _no_best(name, output_dir)
        found = checkpoint.copy(checkpoint.require_good(beside), output_dir, fit.saver.line)
        logger.info("copied the best checkpoint so far, %s, to %s", beside, found)
    fit.state.best_model_checkpoint = str(found) if found else None


def load(model: nn.Module, args: TrainingArguments, state: TrainerState, line: Line) -> None:
    """Put the best weights into the model, if the run is to end with them and they were saved.

    Raises StorageError if their checkpoint is damaged or of another run.
    """
    if not args.load_best_model_at_end:
        return
    if state.best_model_checkpoint is None:
        logger.warning(
            "load_best_model_at_end: the best evaluation, of step %s, has no checkpoint; nothing is loaded, "
            "the model keeps the weights of step %d", state.best_global_step, state.global_step,
        )  # fmt: skip
        return
    folder = checkpoint.require_good(Path(state.best_model_checkpoint))
    if checkpoint.find(folder.name, line, [folder.parent]) is None:
        raise _no_best(folder.name, folder.parent)
    weights.load_weights(model, folder)
    logger.info(
        "loaded the best model (%s %.4f) from %s",
        args.metric_for_best_model, state.best_metric, state.best_model_checkpoint,
    )  # fmt: skip


def _no_best(name: str, place: Path) -> StorageError:
    return StorageError(
        what="the best checkpoint of this run is not there",
        got=f"{name} in {place}",
        why="load_best_model_at_end ends with its weights, and a checkpoint of another run does not count",
        fix=f"put {name} of this run back into the output folder, or leave --load_best_model_at_end out",
    )


def _unknown_metric(wanted: str, metrics: dict[str, Any]) -> ConfigError:
    return ConfigError(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"this evaluation gives {', '.join(sorted(metrics))}",
        fix="name one of these in --metric_for_best_model (with or without eval_)",
    )
