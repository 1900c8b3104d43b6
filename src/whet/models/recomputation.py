"""Parts of a packed model that run outside of its pass: a checkpoint computes them again, or another model has them.

Only the pass knows where rows begin and which dropout masks it drew.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels.batch_position import Site, running_position


def require_pass(module: nn.Module, site: Site, x: Tensor) -> None:
    """Raise ConfigError if a backward pass computes the module again and x (B, ...) may be packed, which has B = 1."""
    if x.shape[0] == 1 and x.dim() > 2 and site.placement.is_lost:
        raise ConfigError(
            what="a checkpoint around a part of the model cannot compute it again: the forward pass is over",
            got=f"{type(module).__name__} called in backward, input of shape {tuple(x.shape)}",
            why="without the pass, rows that lie end to end would see each other, and dropout would draw other masks",
            fix="use model.activation_checkpointing_enable(), or gradient_checkpointing=True in whet's Trainer; under "
            "whet.optimize a checkpoint around the call of the complete model works too",
        )


def require_no_other_pass(module: nn.Module, n_rows: int, n_tokens: int) -> None:
    """Raise ConfigError if a module without a pass is given the packed states of another model's pass."""
    position = None if torch.compiler.is_compiling() else running_position()
    if position is not None and position.is_of(n_rows, n_tokens):
        raise came_later(module)


def came_later(module: nn.Module) -> ConfigError:
    """Return the error for a part that the running pass knows nothing of."""
    return ConfigError(
        what="a part came into the model after whet had prepared it",
        got=type(module).__name__,
        why="in a batch without padding it would see the tokens of all rows",
        fix="change the model first, then call whet.optimize or make the Trainer; a part of another model that whet "
        "prepared has to be taken from it before, or after whet.restore",
    )
