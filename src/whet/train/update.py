"""Updates the weights with the gradients: after the backward pass, or inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.kernels.adamw import gradient_norm
from whet.optim import schedule
from whet.optim.in_backward import InBackward
from whet.train.clipping import Clipping
from whet.train.optimizer_setup import UntrainedParameters


@dataclass(frozen=True, kw_only=True)
class OptimizerUpdate:
    """One step of the optimizer over complete gradients."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    clipping: Clipping
    untrained: UntrainedParameters
    send: Callable[[str], None]
    """Sends an event to the callbacks."""
    stepping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Put around the optimizer's step: ranks that share the optimizer exchange its results there."""

    def gradient_norm(self) -> float:
        return gradient_norm([one.grad for one in self.parameters if one.grad is not None])

    def apply(self, grad_scale: float) -> None:
        self.clipping.prepare(grad_scale)
        self.send("on_pre_optimizer_step")
        self.untrained.warn()
        with self.stepping():
            self.optimizer.step()
        self.send("on_optimizer_step")

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        schedule.after_step(self.scheduler)


@dataclass(frozen=True)
class UpdateInBackward:
    """Most weights are updated during the backward pass; `rest` updates those whose gradients came another way."""

    hooks: InBackward
    rest: OptimizerUpdate

    def gradient_norm(self) -> float:
        norm, _ = self.hooks.finish()
        return norm

    def apply(self, grad_scale: float) -> None:
        self.rest.apply(grad_scale)

    def clear(self) -> None:
        self.rest.clear()
