"""Learning rates by depth (`layerwise_lr_decay`): each parameter's share of the learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.models.view import ModelView

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_ROUNDING = 1e-6
"""Of a rate that an optimizer keeps in a float32 tensor."""


def of(model: nn.Module, args: TrainingArguments) -> dict[int, float] | None:
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


def require_used(model: nn.Module, args: TrainingArguments, optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer that whet did not build has other learning rates than were asked for."""
    rates = of(model, args)
    if rates is None:
        return
    for group in optimizer.param_groups:
        found = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"]:
            wanted = args.learning_rate * rates.get(id(parameter), 1.0)
            if not math.isclose(found, wanted, rel_tol=_ROUNDING):
                raise _not_used(optimizer, found, wanted)


def _not_used(optimizer: Optimizer, found: float, wanted: float) -> ConfigError:
    return ConfigError(
        what="layerwise_lr_decay is not carried out by this optimizer",
        got=f"{type(optimizer).__name__} with a learning rate of {found:g} where {wanted:g} was asked for",
        why="an optimizer of your own, or of another package, brings its own groups of parameters",
        fix="leave --layerwise_lr_decay out, or choose one of whet's optimizers with --optim",
    )
