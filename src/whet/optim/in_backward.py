"""A step inside backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed.

The gradients of all parameters never exist at the same time (Lv et al. 2023, arXiv:2306.09782, section 3.1). It works
with any torch optimizer: the hook of a parameter calls its step with that parameter alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whet.card import Card
from whet.kernels import shared_memory
from whet.kernels.embedding import TAKES_THE_REST
from whet.log import logger

CARD = Card(
    name="step inside backward",
    asked_by="optimizer_in_backward",
    does="Each weight is updated as soon as its gradient is complete, which is then freed.",
    improves="memory",
    same_result="yes",
    hurts="With accumulation or clipping by the norm, which it excludes.",
    source="Lv et al. 2023, arXiv:2306.09782, section 3",
    page="memory.md#a-step-inside-backward",
)

_SMALL_FRAC = 1e-3
"""The share of all weights below which the gradient of a parameter stays until the end of the step: biases, norms."""


class InBackward:
    """Hooks that make an optimizer step during the backward pass, until `remove`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._squares: list[Tensor] = []
        self._waiting: frozenset[int] | None = None
        """The ids of the parameters that `finish` leaves to the optimizer's own step; None: this step has not begun."""
        self._n_left_out = 0
        parameters = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(number)) for number, p in parameters]

    def _hook(self, number: int) -> Any:
        def take(parameter: Any) -> None:
            self._take(parameter, number)

        setattr(take, TAKES_THE_REST, True)  # `finish` uses gradients that did not come through autograd
        return take

    def remove(self) -> None:
        """Remove the hooks: backward leaves gradients again."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> tuple[float, bool]:
        """End the step: return the norm of all its gradients, and whether all of them were finite.

        Some gradients still exist, and the optimizer's own step uses them: those that did not come through autograd,
        small ones, and those of parameters that share memory, as the backward pass still reads one when the other is
        complete.
        """
        left = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        squares = [*self._squares, *(_square(grad) for grad in left)]
        norm = math.sqrt(float(sum(squares))) if squares else 0.0
        whole = self._n_left_out == 0 and math.isfinite(norm)
        if self._n_left_out:
            logger.warning("%d gradients were not finite and were skipped; the others were used", self._n_left_out)
        self._squares, self._n_left_out, self._waiting = [], 0, None
        return norm, whole

    @torch.no_grad()
    def _take(self, parameter: Any, number: int) -> None:
        if self._waiting is None:
            self._waiting = _left_to_the_end(self._optimizer)
        if id(parameter) in self._waiting:
            return
        square = _square(parameter.grad)
        self._squares.append(square)
        if torch.isfinite(square):
            with _alone(self._optimizer, parameter, number):
                self._optimizer.step()
        else:
            self._n_left_out += 1
        parameter.grad = None


def _left_to_the_end(optimizer: Optimizer) -> frozenset[int]:
    """Return the ids of parameters that share memory, and of small ones, which one call updates faster than many."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    sharing = {number for group in shared_memory.overlapping(parameters) for number in group}
    small = _SMALL_FRAC * sum(one.numel() for one in parameters)
    return frozenset(id(one) for number, one in enumerate(parameters) if number in sharing or one.numel() < small)


def _square(grad: Tensor) -> Tensor:
    return grad.detach().norm(dtype=torch.float32).square().double()


@contextmanager
def _alone(optimizer: Optimizer, parameter: Tensor, number: int) -> Iterator[None]:
    """Show the optimizer only this parameter of this group."""
    groups, group = optimizer.param_groups, optimizer.param_groups[number]
    members, group["params"], optimizer.param_groups = group["params"], [parameter], [group]
    try:
        yield
    finally:
        group["params"], optimizer.param_groups = members, groups
