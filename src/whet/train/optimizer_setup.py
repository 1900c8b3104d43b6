"""Optimizer and schedule of a run, through the methods of the Trainer that users override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.log import logger
from whet.optim import registry, schedule
from whet.optim.groups import decayed_names, with_rates
from whet.optim.optimizers import torchao
from whet.train.compat import overrides
from whet.train.compat.public import PublicTrainer
from whet.train.few_samples import layer_rates

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments


_MOST_NAMED = 3


def build(trainer: PublicTrainer, n_steps: int) -> tuple[Optimizer, Any]:
    """Return the optimizer and the schedule of a run of `n_steps` steps, and set them on the Trainer.

    Those that an earlier run of this Trainer made are made again; those that the user gave or set are used.
    """
    if trainer.optimizer is not None and trainer.optimizer is trainer.made_optimizers[0]:
        logger.info("a new optimizer, as in each call of train(); transformers keeps the state of the earlier one")
        trainer.optimizer = trainer.given_optimizers[0]
    if trainer.lr_scheduler is trainer.made_optimizers[1]:
        trainer.lr_scheduler = trainer.given_optimizers[1]
    if trainer.optimizer is not None and trainer.lr_scheduler is None:
        _reset_rates(trainer.optimizer)
    trainer.create_optimizer_and_scheduler(num_training_steps=n_steps)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    if optimizer is None or scheduler is None:
        raise _not_set(trainer, "optimizer" if optimizer is None else "lr_scheduler")
    layer_rates.require_used(trainer.model, trainer.args, optimizer)
    optimizer = trainer.optimizer = torchao.make_saveable(optimizer)
    trainer.made_optimizers = (optimizer, scheduler)
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


def create_optimizer(trainer: PublicTrainer, model: nn.Module) -> Optimizer:
    """Return the optimizer that the arguments of the Trainer, or overridden methods of it, ask for."""
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, options = trainer.optimizer_cls_and_kwargs
    elif overrides.changed(trainer, "get_optimizer_cls_and_kwargs"):
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    elif overrides.changed(trainer, "get_decay_parameter_names"):
        kind, options = class_and_options(trainer.args, model)
    else:
        return registry.build(model, trainer.args, layer_rates.of(model, trainer.args))
    options = dict(options)
    groups = options.pop("params", None) or options.pop("optimizer_dict", None) or _groups(trainer, model)
    return kind(groups, **options)


def class_and_options(args: TrainingArguments, model: nn.Module | None) -> tuple[Any, dict[str, Any]]:
    """Return a function that makes the optimizer of these arguments from parameter groups, and its options."""

    def make(groups: Any, **options: Any) -> Optimizer:
        assert model is not None
        built = registry.build(model, args)
        groups = [dict(group) if isinstance(group, Mapping) else {"params": [group]} for group in groups]
        common = {
            name: value for name, value in built.param_groups[0].items() if name not in ("params", "weight_decay")
        }
        built.param_groups.clear()
        for group in groups:
            built.add_param_group({**common, "weight_decay": args.weight_decay, **options, **group})
        return built

    if model is None:
        raise ConfigError(
            what="get_optimizer_cls_and_kwargs needs the model",
            why="whet's optimizers are built for a model's parameters",
            fix="call trainer.get_optimizer_cls_and_kwargs(args, trainer.model)",
        )
    return make, {"lr": args.learning_rate}


def decay_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters with weight decay: weights, but not biases and norms."""
    decayed = set(decayed_names(model))
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in decayed]


def create_scheduler(args: TrainingArguments, optimizer: Optimizer, n_steps: int) -> Any:
    """Return the schedule that the arguments name."""
    return schedule.build(optimizer, args, n_steps)


def _groups(trainer: PublicTrainer, model: nn.Module) -> list[dict[str, Any]]:
    decaying = set(trainer.get_decay_parameter_names(model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decaying], "weight_decay": trainer.args.weight_decay},
        {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
    ]
    found = [group for group in groups if group["params"]]
    return with_rates(found, trainer.args.learning_rate, layer_rates.of(model, trainer.args))


def _not_set(trainer: PublicTrainer, name: str) -> ConfigError:
    method = "create_optimizer" if name == "optimizer" else "create_scheduler"
    return ConfigError(
        what=f"{method} of {type(trainer).__name__} left no {name}",
        why=f"the run uses trainer.{name}",
        fix=f"set self.{name} in {method}, and return it",
    )


def _reset_rates(optimizer: Optimizer) -> None:
    """Reset the learning rates to those before the schedule of an earlier run."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
