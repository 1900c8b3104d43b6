"""Which evaluation of a run was the best, and going back to it at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.log import logger
from whet.train import checkpoint, weights


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


def load(model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
    """Put the best weights into the model, if the run is to end with them and they were saved."""
    if not args.load_best_model_at_end:
        return
    if state.best_model_checkpoint is None:
        logger.warning(
            "load_best_model_at_end: the best evaluation, of step %s, has no checkpoint; nothing is loaded, "
            "the model keeps the weights of step %d", state.best_global_step, state.global_step,
        )  # fmt: skip
        return
    weights.load_weights(model, checkpoint.require_good(Path(state.best_model_checkpoint)))
    logger.info(
        "loaded the best model (%s %.4f) from %s",
        args.metric_for_best_model, state.best_metric, state.best_model_checkpoint,
    )  # fmt: skip


def _unknown_metric(wanted: str, metrics: dict[str, Any]) -> ConfigError:
    return ConfigError(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"this evaluation gives {', '.join(sorted(metrics))}",
        fix="name one of these in --metric_for_best_model (with or without eval_)",
    )
