"""One optimizer step: forward, backward, synchronise, finalize, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from whet.card import Card
from whet.data.batch import Batch
from whet.engine.sync import Sync
from whet.engine.update import CLIP_EPS
from whet.objectives.base import Objective
from whet.precision.policy import Precision
from whet.watch.meter import Clock, StepResult


class StepTrunk:
    """What passes of a step take for the results of the frozen layers: these layers run in each pass."""

    def of(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the context of the forward pass of a batch."""
        return nullcontext()


class StepRouting:
    """The routing of one step: that of a dense model, which has none."""

    def watched(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the context of a forward pass of the step."""
        return nullcontext()

    def added_to(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return the share of the step's loss that a micro-batch has, with the losses of the pass just watched."""
        return loss

    def parts(self) -> dict[str, Tensor]:
        """Return the parts of the step's loss that this rank has computed, and its shares of the other figures."""
        return {}


class Routing:
    """The routing of a run: that of a dense model, which has none."""

    def of_step(self, batches: Sequence[Batch], sync: Sync) -> StepRouting:
        """Return the routing of a step with these micro-batches."""
        return StepRouting()


CARD = Card(
    name="accumulation",
    asked_by="gradient_accumulation_steps",
    does="The gradients of several micro-batches are summed before a step.",
    improves="memory",
    same_result="yes",
    hurts="When the rows fit at once: small products are less efficient.",
    source="the sum rule of derivatives; the batch-size section of transformers' guides",
    page="memory.md#accumulation",
)


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step: the mean over the targets of all its micro-batches."""

    total: Tensor
    """() float32; the gradient is that of this number."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named parts of it, each () float32, such as the loss of a router of experts."""


class Gradients(Protocol):
    """Forward and backward passes of a step."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepLoss:
        """Leave the gradient of the step in .grad and return the step's loss."""
        ...


class Update(Protocol):
    """Updates the weights with the gradients: after the backward pass, or inside it."""

    def gradient_norm(self) -> float:
        """Return the norm of the step's gradient, after the last backward pass."""
        ...

    def apply(self, grad_scale: float) -> None:
        """Update the weights with the gradient times `grad_scale`."""
        ...

    def clear(self) -> None:
        """Drop the gradients and advance the schedule of the learning rate."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The versions of each part of the step, chosen once per run."""

    parameters: Sequence[nn.Parameter]
    gradients: Gradients
    update: Update
    precision: Precision
    sync: Sync
    reject_spike: Callable[[StepResult], StepResult] | None
    """Returns the result, marked as not applied if its loss is a spike; None: no loss is one."""
    max_grad_norm: float
    """The gradient is scaled down to this norm; 0: no clipping."""
    clock: Clock = field(default_factory=Clock)


def take_step(parts: StepParts, batches: Sequence[Batch], step: int) -> StepResult:
    """Take optimizer step `step`, counted from 0, over its micro-batches."""
    with parts.clock.of("forward_backward"):
        loss = parts.gradients(batches, step)
        parts.sync.reduce_gradients(parts.parameters)
    with parts.clock.of("update"):
        result = finalize_gradients(parts, loss)
        if parts.reject_spike is not None:
            result = parts.reject_spike(result)
        if result.applied:
            parts.update.apply(result.grad_scale)
        parts.update.clear()
    return result


class LossParts:
    """The means of the named parts of a step's loss; a part that a micro-batch does not have counts as 0 there."""

    def __init__(self, n_targets: Any) -> None:
        self.means: dict[str, Tensor] = {}
        self.n_targets = n_targets

    def add(self, sums: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Add this share of the sums of a micro-batch."""
        for name, part in sums.items():
            mean = share * part.detach() / self.n_targets
            self.means[name] = self.means[name] + mean if name in self.means else mean


@dataclass(frozen=True, kw_only=True)
class ObjectiveGradients:
    """Forward and backward with one of whet's objectives.

    The loss is a sum over targets, divided by their number over all micro-batches and ranks: never a mean of means.
    """

    objective: Objective
    precision: Precision
    seed: int
    sync: Sync = field(default_factory=Sync)
    routing: Routing = field(default_factory=Routing)
    trunk: StepTrunk = field(default_factory=StepTrunk)
    between: Callable[[], None] = lambda: None
    """Called between two micro-batches."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepLoss:
        objective, precision = self.objective, self.precision
        precision.begin(self.seed, step)
        n_targets = self.sync.total_targets(sum(objective.count(batch) for batch in batches if not batch.is_extra))
        total, loss_parts = torch.zeros(()), LossParts(n_targets)
        routing = self.routing.of_step(batches, self.sync)
        for number, batch in enumerate(batches):
            if number:
                self.between()
            self.sync.begin_micro_batch(is_last=number + 1 == len(batches))
            with precision.forward(), routing.watched(batch):
                loss = self.sync.forward(partial(self._loss, batch, step, loss_parts, routing))
            precision.backward(self.sync.before_backward(loss))
            total = total.to(loss.device) + loss.detach()
        total = total if n_targets else total + float("nan")  # without targets the mean is 0 / 0, not 0
        return StepLoss(total, loss_parts.means | routing.parts())

    def _loss(self, batch: Batch, step: int, parts: LossParts, routing: Any) -> Tensor:
        """Return the share of a micro-batch in the step's loss."""
        objective = self.objective
        with self.trunk.of(batch):
            output = objective.forward(batch, seed=self.seed, step=step)
        with record_function("whet::loss"):
            loss = objective.loss_sum(output, batch) / max(parts.n_targets, 1)
            parts.add(objective.loss_parts(output, batch), 0.0 if batch.is_extra else 1.0)
            return routing.added_to(loss * 0.0 if batch.is_extra else loss, batch)


@record_function("whet::optimizer")
def finalize_gradients(parts: StepParts, step_loss: StepLoss) -> StepResult:
    """Unscale the gradient; return whether the step is applied, and with which factor of clipping."""
    parts.precision.unscale(parts.parameters)
    loss = float(parts.sync.total_loss(step_loss.total))
    loss_parts = {name: float(parts.sync.total_loss(part)) for name, part in step_loss.parts.items()}
    norm = parts.sync.gradient_norm(parts.update.gradient_norm())
    finite = parts.sync.all_finite(math.isfinite(loss) and math.isfinite(norm))
    clips = finite and 0 < parts.max_grad_norm < norm + CLIP_EPS
    return StepResult(
        loss=loss,
        grad_norm=norm,
        finite=finite,
        applied=finite,
        grad_scale=parts.max_grad_norm / (norm + CLIP_EPS) if clips else 1.0,
        rescaled=parts.precision.adapt() and math.isfinite(loss),
        loss_parts=loss_parts,
    )
