"""Optimizer and schedule of a run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.log import logger
from whet.optim import registry, schedule
from whet.optim.optimizers.adamw_packages import make_saveable
from whet.train.compat.public import PublicTrainer
from whet.train.few_samples import layer_rates

_MOST_NAMED = 3


def build(trainer: PublicTrainer, n_steps: int) -> tuple[Optimizer, Any]:
    """Return the optimizer and the schedule of a run of `n_steps` steps, and set them on the Trainer.

    Those that an earlier run of this Trainer made are made again; those that were given are used.
    """
    model, args = trainer.model, trainer.args
    optimizer, scheduler = trainer.given_optimizers
    if optimizer is None:
        if trainer.optimizer is not None:
            logger.info("a new optimizer, as in each call of train()")
        optimizer = registry.build(model, args, layer_rates.of(model, args))
    elif scheduler is None:
        _reset_rates(optimizer)
    layer_rates.require_used(model, args, optimizer)
    optimizer = make_saveable(optimizer)
    scheduler = schedule.build(optimizer, args, n_steps) if scheduler is None else scheduler
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    trainer.events.optimizer, trainer.events.lr_scheduler = optimizer, scheduler
    return optimizer, scheduler


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
