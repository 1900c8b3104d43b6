"""Conversion of settings to arguments of torch's operators, and of absent tensors to results."""

from torch import Tensor

from whet.kernels.batch_position import KeyedPosition
from whet.kernels.specs import Drop


def drop_of(p: float, site: int, keys: Tensor | None, slots: Tensor | None, positions: Tensor | None) -> Drop | None:
    """Return the dropout that `graph.mask_arguments` turned into these arguments."""
    if keys is None or slots is None or positions is None:
        return None
    return Drop(p, KeyedPosition(0, 0, slots, positions, slots, slots, keys), site)


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return the tensor; an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor


def shaped_as(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return a new tensor of the same shape and dtype; an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


def or_none(tensor: Tensor, *, wanted: bool) -> Tensor | None:
    """Return the tensor if it is wanted."""
    return tensor if wanted else None
