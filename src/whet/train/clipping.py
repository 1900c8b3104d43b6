"""How a step's gradient gets its clipping factor: in a pass of its own, or on its way through the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from whet.kernels.optimizer.rows_in_use import rows_in_use
from whet.optim.optimizers.native import NativeAdamW
from whet.train.callbacks.events import Events

_EVENTS = ("on_pre_optimizer_step", "on_optimizer_step")
"""What callbacks are told while the clipped gradient is there."""


class Clipping(Protocol):
    """The seam of the step."""

    def prepare(self, grad_scale: float) -> None:
        """See to it that the optimizer's next step takes the gradient times grad_scale."""
        ...


class OwnPass:
    """The gradient is multiplied before the optimizer's step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @record_function("whet::optimizer")
    def prepare(self, grad_scale: float) -> None:
        if grad_scale == 1.0:
            return
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        known = [(grad, rows) for grad in found if (rows := rows_in_use(grad)) is not None]
        torch._foreach_mul_(found, grad_scale)  # pyright: ignore[reportPrivateImportUsage] a call a device, not a tensor
        for grad, rows in known:  # a product with zero is zero
            rows.put_on(grad)


class InOptimizer:
    """The optimizer multiplies as it reads, unless somebody could look at the gradient before or after."""

    def __init__(self, optimizer: NativeAdamW, own_pass: OwnPass, events: Events) -> None:
        self._optimizer, self._own_pass, self._events = optimizer, own_pass, events

    def prepare(self, grad_scale: float) -> None:
        watched = self._optimizer.has_step_hooks or any(self._events.heard(event) for event in _EVENTS)
        self._optimizer.grad_scale = 1.0 if watched else grad_scale
        if watched:
            self._own_pass.prepare(grad_scale)


def choose(optimizer: Optimizer, parameters: Sequence[nn.Parameter], events: Events) -> Clipping:
    """Return the way of this optimizer."""
    own_pass = OwnPass(parameters)
    return InOptimizer(optimizer, own_pass, events) if isinstance(optimizer, NativeAdamW) else own_pass
