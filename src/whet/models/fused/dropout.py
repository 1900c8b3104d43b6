"""Dropout whose masks depend on a token's position in the run, not on torch's generator."""

import math

from torch import Tensor, nn

from whet.kernels.batch_position import Drop, Site
from whet.kernels.dropout import dropout
from whet.models.recomputation import came_later, require_pass


class PlacedDropout(nn.Dropout):
    """Dropout whose mask is a function of (seed, step, site, row, position, channel); plain dropout outside of whet.

    Only the class of a dropout module changes, so it keeps its hooks and its place in the model.
    """

    site: Site

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        position = self.site.position
        if position is None:
            require_pass(self, self.site, input)
        if position is None or not position.has(math.prod(input.shape[:-1])):
            return nn.functional.dropout(input, self.p)
        drop = Drop.at(self.site, self.p, position)
        return input if drop is None else dropout(input, drop)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, site={self.site.number}"


def drop_of(module: PlacedDropout) -> Drop | None:
    """Return the dropout of this use of the module; None if nothing is dropped."""
    if not module.training or module.p == 0.0:
        return None
    position = module.site.position
    if position is None:  # its owner runs in a pass
        raise came_later(module)
    return Drop.at(module.site, module.p, position)
