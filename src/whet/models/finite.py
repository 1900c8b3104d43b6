"""Whether a model, or an optimizer's state, holds numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def not_finite(model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
    """Return the names of the weights, and of their optimizer's means, that hold NaN or infinity.

    Of buffers only NaN counts: masks are made of infinities.
    """
    found = [name for name, value in model.named_parameters() if not all(map(_is_finite, _plain_tensors(value)))]
    found += [name for name, value in model.named_buffers() if any(map(_has_nan, _plain_tensors(value)))]
    return found + ([] if optimizer is None else list(_spoilt_state(optimizer, _names(model))))


def _spoilt_state(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not all(_is_finite(tensor) for tensor in _plain_tensors(value)):
                yield f"{name} of {names.get(id(parameter), 'a weight')}"


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a weight or a value of the state: those inside a dict, and those of a quantised one."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _plain_tensors(part)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _is_finite(value: Tensor) -> bool:
    """A sum is finite only if every term is; where the sum overflows, look at each."""
    if not value.is_floating_point():
        return True
    value = value.detach()
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def _has_nan(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def shown(names: Iterable[str], most: int = 5) -> str:
    """Return the first of the names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
