"""Remembers the best evaluation of a run, and loads its weights at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.store import find, weights, write
from whet.store.find import Lineage


def is_better(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Return whether these metrics are better than the best so far; a metric that is not finite never is."""
    if args.metric_for_best_model is None:
        return False
    value, best = _metric(args.metric_for_best_model, metrics), state.best_metric
    sign = 1.0 if args.greater_is_better else -1.0
    return math.isfinite(value) and (best is None or sign * value > sign * best)


def remember(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> None:
    """Remember these metrics as the best so far. Their checkpoint is remembered when it is saved."""
    assert args.metric_for_best_model is not None
    state.best_metric, state.best_global_step = _metric(args.metric_for_best_model, metrics), state.global_step
    state.best_model_checkpoint = None


def step_of_weights(args: TrainingArguments, state: TrainerState) -> int:
    """Return the step whose weights a training has ended with: the last, or the best if it ends with that one."""
    is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
    return (state.best_global_step if is_best else None) or state.global_step


def _metric(wanted: str, metrics: dict[str, float]) -> float:
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if name not in metrics:
        raise _unknown_metric(wanted, metrics)
    return metrics[name]


def restored_folder(args: TrainingArguments, lineage: Lineage, saved: str | None, folder: Path) -> Path | None:
    """Return the best checkpoint that the state in `folder` names, if it belongs to this lineage.

    Only its name counts. It is copied if it is next to `folder`, outside the output folder, and the run ends with the
    best model. Raises StorageError if the run ends with the best model and its checkpoint is missing.
    """
    name = Path(saved).name if saved else None
    if name is None:
        return None
    output_dir = Path(args.output_dir)
    found = find.by_name(name, lineage, output_dir)
    if found is not None or not args.load_best_model_at_end:
        return found
    elsewhere = find.by_name(name, lineage, folder.resolve().parent)
    if elsewhere is None:
        raise _no_best(name, output_dir)
    copied = write.copy(find.require_intact(elsewhere), output_dir, lineage)
    logger.info("copied the best checkpoint so far, %s, to %s", elsewhere, copied)
    return copied


def load(model: nn.Module, args: TrainingArguments, state: TrainerState, lineage: Lineage) -> None:
    """Load the best weights into the model, if the run ends with them and they were saved.

    Raises StorageError if their checkpoint is damaged or belongs to another run.
    """
    if not args.load_best_model_at_end:
        return
    if state.best_model_checkpoint is None:
        logger.warning(
            "load_best_model_at_end: the best evaluation, of step %s, has no checkpoint; nothing is loaded, "
            "the model keeps the weights of step %d", state.best_global_step, state.global_step,
        )  # fmt: skip
        return
    folder = find.require_intact(Path(state.best_model_checkpoint))
    if find.by_name(folder.name, lineage, folder.parent) is None:
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
