"""Whether a model, an optimizer's state, or what a model gives, holds finite numbers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.errors import NonFiniteError

T = TypeVar("T")


def require_finite(
    model: Any, optimizer: Any, when: str, of_all: Callable[[list[str]], list[list[str]]] = lambda found: [found]
) -> None:
    """Raise NonFiniteError (exit 70) if a weight, or its state in the optimizer, is not finite.

    `of_all` returns the names that the ranks have found, where each has a share of the state.
    """
    if found := [name for names in of_all(not_finite(model, optimizer)) for name in names]:
        raise NonFiniteError(
            what=f"the weights are not finite {when}",
            got=shown(found),
            why="a model with such weights is useless; it was not saved",
            fix="resume from an earlier checkpoint with --resume_from_checkpoint auto, a lower --learning_rate and "
            "--resume_allow_changes learning_rate; or find out what changed the weights",
        )


def require_finite_logits(found: Sequence[np.ndarray], why: str, unit: str = "logits") -> None:
    """Raise NonFiniteError (exit 70) if some of these numbers are not finite; `why` says what is made of the logits.

    `unit` is the word for what each number stands for.
    """
    if n_broken := sum(int((~np.isfinite(one)).sum()) for one in found):
        raise NonFiniteError(
            what="the model's logits are infinite or not numbers",
            got=f"{n_broken} of {sum(one.size for one in found)} {unit}",
            why=why,
            fix="use an earlier checkpoint; or train again with a lower --learning_rate, or --bf16 instead of --fp16",
        )


def not_finite(model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
    """Return the names of the weights, and of their optimizer's means, that hold NaN or infinity.

    Of buffers only NaN counts: masks are made of infinities.
    """
    weights = list(model.named_parameters())
    found = _odd(weights) + _odd(model.named_buffers(), may_be_infinite=True)
    if optimizer is None:
        return found
    states = [((name, parameter), one) for parameter, of in optimizer.state.items() for name, one in of.items()]
    names = {id(parameter): name for name, parameter in weights}
    return found + [f"{name} of {names.get(id(parameter), 'a weight')}" for name, parameter in _odd(states)]


def _odd(named: Iterable[tuple[T, Any]], *, may_be_infinite: bool = False) -> list[T]:
    """Return the names of the values that hold NaN or infinity: themselves, in a dict, or in a quantised tensor."""
    found: list[T] = []
    for name, value in named:
        left = [value]
        while left:
            one = left.pop()
            if isinstance(one, Mapping):
                left += one.values()
            elif isinstance(one, Tensor) and is_traceable_wrapper_subclass(one):
                left += [getattr(one, part) for part in one.__tensor_flatten__()[0]]  # pyright: ignore[reportAttributeAccessIssue]
            elif isinstance(one, Tensor) and one.is_floating_point():
                one = one.detach()
                # A sum is finite only if every term is; where the sum overflows, look at each.
                if not bool(torch.isfinite(one.sum())) and bool(
                    one.isnan().any() if may_be_infinite else not torch.isfinite(one).all()
                ):
                    found.append(name)
                    break
    return found


def shown(names: Iterable[str], most: int = 5) -> str:
    """Return the first of the names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
