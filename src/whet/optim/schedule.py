"""Learning rate schedules of transformers, built from the run's length."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import get_scheduler, optimization

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError

_BY_METRIC = tuple(kind for kind in (ReduceLROnPlateau, getattr(optimization, "GreedyLR", None)) if kind is not None)
"""Schedules that change at evaluations; older releases of transformers have no GreedyLR."""


def warmup_steps(args: TrainingArguments, n_steps: int) -> int:
    """Return the steps of warm-up: `warmup_steps` (a fraction of the run below 1), else `warmup_ratio` of the run."""
    return args.get_warmup_steps(n_steps)


def build(optimizer: Optimizer, args: TrainingArguments, n_steps: int) -> Any:
    """Return the learning rate scheduler of the run; raises ConfigError if its parameters do not fit."""
    n_warm, kwargs = warmup_steps(args, n_steps), dict(args.lr_scheduler_kwargs or {})
    if args.lr_scheduler_type == "warmup_stable_decay":
        _require_steps(n_warm, kwargs, n_steps)
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=n_warm,
            num_training_steps=n_steps,
            scheduler_specific_kwargs=kwargs,
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            what=f"the {args.lr_scheduler_type} schedule does not take these parameters",
            got=kwargs,
            why=str(error),
            fix="change them in --lr_scheduler_kwargs, or choose another --lr_scheduler_type",
        ) from error


def moves_by_metric(scheduler: Any) -> bool:
    """Return whether the schedule changes at evaluations and not at steps."""
    return isinstance(scheduler, _BY_METRIC)


def after_step(scheduler: Any) -> None:
    """Advance the learning rate by one optimizer step, unless it changes at evaluations."""
    if moves_by_metric(scheduler):
        return
    with warnings.catch_warnings():  # torch warns about a first step that was not applied
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def after_evaluation(scheduler: Any, args: TrainingArguments, metrics: Mapping[str, float]) -> None:
    """Update the learning rate from an evaluation's metric, if it uses one; ConfigError without the metric."""
    if not moves_by_metric(scheduler):
        return
    wanted = args.metric_for_best_model or "loss"
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if name not in metrics:
        raise ConfigError(
            what="the schedule has no metric to follow",
            got=f"metric_for_best_model={wanted}",
            why=f"this evaluation gives {', '.join(sorted(metrics))}",
            fix="name one of these in --metric_for_best_model (with or without eval_)",
        )
    scheduler.step(metrics[name])


def state_of(scheduler: Any) -> dict[str, Any]:
    """Return the schedule's state for JSON, which has no infinity: a metric's initial value is written as text."""
    state = scheduler.state_dict()
    if not moves_by_metric(scheduler):
        return state
    return {name: str(value) if _is_infinite(value) else value for name, value in state.items()}


def load_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore what `state_of` returned."""
    if moves_by_metric(scheduler) and isinstance(state.get("best"), str):
        state = {**state, "best": float(state["best"])}
    scheduler.load_state_dict(dict(state))


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _require_steps(n_warm: int, kwargs: Mapping[str, Any], n_steps: int) -> None:
    """Refuse a decay that would begin before the warm-up ends; transformers computes a negative number of steps."""
    n_decay = kwargs["num_decay_steps"]
    if "num_stable_steps" in kwargs or n_warm + n_decay <= n_steps:
        return
    raise ConfigError(
        what="the parts of the warmup_stable_decay schedule are longer than the run",
        got=f"{n_warm} steps of warm-up and {n_decay} of decay in a run of {n_steps}",
        why="the learning rate would fall before it has reached its peak",
        fix="lower --warmup_steps, or num_decay_steps in --lr_scheduler_kwargs",
    )
