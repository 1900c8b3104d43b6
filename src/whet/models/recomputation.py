"""Parts of a packed model that a checkpoint of the user's computes again, when the forward pass is over.

Only the pass knows where rows begin and which dropout masks it drew.
"""

from __future__ import annotations

from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels.batch_position import Site


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
