"""Language models whose head computes logits when they are read: their loss needs a chunk of them at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.kernels.cross_entropy import chunk_rows
from whet.kernels.operator import is_followed
from whet.models import standard
from whet.models.binding import bind, bound
from whet.objectives.lazy_logits import LazyLogits


def apply(model: nn.Module) -> None:
    """Let the layer of the model that turns hidden states into logits return lazy ones, if it is a linear layer."""
    head = _head_of(model)
    if head is not None and standard.why_called(head, nn.Linear) is None:
        head.forward = bind(_forward, head)


def restore(model: nn.Module) -> None:
    """Undo `apply`, exactly."""
    for module in model.modules():  # an adapter may have been put around the head since
        if bound(module) is _forward:
            del module.forward


def _head_of(model: Any) -> nn.Module | None:
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _forward(self: Any, states: Tensor) -> Tensor:
    """Stand in for the forward of a linear layer (..., D) -> (..., V): lazy if the result is larger than a chunk."""
    size = states.numel() // states.shape[-1] if states.dim() == 3 and states.numel() else 0
    lazy = size > chunk_rows(self.weight) and type(states) is Tensor and states.dtype == self.weight.dtype
    if not lazy or is_followed() or standard.why_odd(self) is not None:
        return nn.functional.linear(states, self.weight, self.bias)
    return LazyLogits.of(states, self.weight, self.bias)
