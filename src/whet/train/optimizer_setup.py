"""Optimizer and schedule of a run, with learning rates by depth (`layerwise_lr_decay`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.log import logger
from whet.models.view import ModelView
from whet.optim import registry, schedule
from whet.optim.optimizers.adamw_packages import make_saveable
from whet.train.compat.public import PublicTrainer

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_MOST_NAMED = 3
_ROUNDING = 1e-6
"""Of a rate that an optimizer keeps in a float32 tensor."""


def build(trainer: PublicTrainer, n_steps: int) -> tuple[Optimizer, Any]:
    """Return the optimizer and the schedule of a run of `n_steps` steps, and set them on the Trainer.

    Those that an earlier run of this Trainer made are made again; those that were given are used.
    """
    model, args = trainer.model, trainer.args
    optimizer, scheduler = trainer.given_optimizers
    if optimizer is None:
        if trainer.optimizer is not None:
            logger.info("a new optimizer, as in each call of train()")
        optimizer = registry.build(model, args, rates_by_depth(model, args))
    elif scheduler is None:
        _reset_rates(optimizer)
    _require_rates(model, args, optimizer)
    optimizer = make_saveable(optimizer)
    scheduler = schedule.build(optimizer, args, n_steps) if scheduler is None else scheduler
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    trainer.events.optimizer, trainer.events.lr_scheduler = optimizer, scheduler
    return optimizer, scheduler


def rates_by_depth(model: nn.Module, args: TrainingArguments) -> dict[int, float] | None:
    """Return the share of the learning rate of each parameter by its id; None if all have the same.

    The head has 1, the last block `layerwise_lr_decay`, the block below it the square of that, and so on down to the
    embeddings (Howard and Ruder 2018, arXiv:1801.06146, section 3.2). Raises ConfigError if the depth is not known.
    """
    if args.layerwise_lr_decay == 1:
        return None
    depths = ModelView(model).depths()
    if not depths:
        raise ConfigError(
            what="layerwise_lr_decay does not go with this model",
            got=type(model).__name__,
            why="it needs one stack of blocks with weights of their own: whet cannot tell how deep the weights of this "
            "model are",
            fix="leave --layerwise_lr_decay out; whet.Trainer takes rates of your own as optimizers=(optimizer, None)",
        )
    top = max(depths.values())
    return {name: args.layerwise_lr_decay ** (top - depth) for name, depth in depths.items()}


def _require_rates(model: nn.Module, args: TrainingArguments, optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer that whet did not build has other learning rates than were asked for."""
    rates = rates_by_depth(model, args)
    if rates is None:
        return
    for group in optimizer.param_groups:
        found = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"]:
            wanted = args.learning_rate * rates.get(id(parameter), 1.0)
            if not math.isclose(found, wanted, rel_tol=_ROUNDING):
                raise _other_rates(optimizer, found, wanted)


def _other_rates(optimizer: Optimizer, found: float, wanted: float) -> ConfigError:
    return ConfigError(
        what="layerwise_lr_decay is not carried out by this optimizer",
        got=f"{type(optimizer).__name__} with a learning rate of {found:g} where {wanted:g} was asked for",
        why="an optimizer of your own, or of another package, brings its own groups of parameters",
        fix="leave --layerwise_lr_decay out, or choose one of whet's optimizers with --optim",
    )


class UntrainedParameters:
    """Parameters that get a gradient but are not in the optimizer, as they were unfrozen after it was made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._frozen = _not_in_optimizer(model, optimizer)
        """Checked after each step; empty in most runs."""

    def warn(self) -> None:
        """Log a warning about them, once for each; transformers' Trainer does not train them either."""
        if not any(parameter.grad is not None for parameter in self._frozen.values()):
            return
        outside = _not_in_optimizer(self._model, self._optimizer)
        found = [name for name, one in self._frozen.items() if one.grad is not None and name in outside]
        self._frozen = {name: one for name, one in self._frozen.items() if one.grad is None}
        if found:
            logger.warning(
                "%d parameters get gradients and are not trained, as they were frozen when the optimizer was made: %s; "
                "their gradients count when clipping; to train them later, freeze them in on_train_begin instead, when "
                "the optimizer has been made",
                len(found), ", ".join(found[:_MOST_NAMED]) + (" ..." if len(found) > _MOST_NAMED else ""),
            )  # fmt: skip


def _not_in_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name: one for name, one in model.named_parameters() if id(one) not in held}


def _reset_rates(optimizer: Optimizer) -> None:
    """Reset the learning rates to those before the schedule of an earlier run."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
