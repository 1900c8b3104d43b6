"""Clips the gradient of a step: in a separate pass, or fused with the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from whet.kernels.rows_in_use import rows_in_use
from whet.optim.optimizers.native import NativeAdamW
from whet.train.callbacks.events import Events

_EVENTS = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events at which a callback may read the clipped gradient."""


class Clipping(Protocol):
    """How the clipping factor reaches the weights."""

    def prepare(self, grad_scale: float) -> None:
        """Make the next step of the optimizer use the gradient times `grad_scale`."""
        ...


class ClipInOwnPass:
    """The gradient is multiplied before the optimizer's step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @record_function("whet::optimizer")
    def prepare(self, grad_scale: float) -> None:
        if grad_scale == 1.0:
            return
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        tracked = [(grad, rows) for grad in found if (rows := rows_in_use(grad)) is not None]
        torch._foreach_mul_(found, grad_scale)  # pyright: ignore[reportPrivateImportUsage] one call per device, not per tensor
        for grad, rows in tracked:  # rows without a gradient stay zero
            rows.put_on(grad)


class ClipInOptimizer:
    """The optimizer scales the gradient as it reads it, unless a callback or a hook may read the gradient."""

    def __init__(self, optimizer: NativeAdamW, own_pass: ClipInOwnPass, events: Events) -> None:
        self._optimizer, self._own_pass, self._events = optimizer, own_pass, events

    def prepare(self, grad_scale: float) -> None:
        watched = self._optimizer.has_step_hooks or any(self._events.has_listener(event) for event in _EVENTS)
        self._optimizer.grad_scale = 1.0 if watched else grad_scale
        if watched:
            self._own_pass.prepare(grad_scale)


def choose(optimizer: Optimizer, parameters: Sequence[nn.Parameter], events: Events) -> Clipping:
    """Return how this optimizer clips."""
    own_pass = ClipInOwnPass(parameters)
    return ClipInOptimizer(optimizer, own_pass, events) if isinstance(optimizer, NativeAdamW) else own_pass
