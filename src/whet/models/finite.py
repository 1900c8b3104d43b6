"""Whether a model, or an optimizer's state, holds numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def not_finite(model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
    """Return the names of the weights, and of their optimizer's means, that hold NaN or infinity.

    Of buffers only NaN counts: masks are made of infinities.
    """
    found = [name for name, value in model.named_parameters() if not _is_finite(value)]
    found += [name for name, value in model.named_buffers() if value.is_floating_point() and bool(value.isnan().any())]
    return found + ([] if optimizer is None else list(_spoilt_state(optimizer, _names(model))))


def _spoilt_state(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and not _is_finite(value):
                yield f"{name} of {names.get(id(parameter), 'a weight')}"


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _is_finite(value: Tensor) -> bool:
    """A sum is finite only if every term is; where the sum overflows, look at each."""
    if not value.is_floating_point():
        return True
    value = value.detach()
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def shown(names: Iterable[str], most: int = 5) -> str:
    """Return the first of the names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
