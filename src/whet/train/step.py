"""One optimizer step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from whet.card import Card
from whet.data.batch import Batch
from whet.kernels.optimizer.adamw import gradient_norm
from whet.objectives.base import Objective
from whet.precision.policy import Precision

CARD = Card(
    name="accumulation",
    asked_by="gradient_accumulation_steps",
    does="The gradients of several micro-batches are summed before one optimizer step.",
    improves="memory",
    same_result="yes",
    hurts="When the rows fit into memory at once: small products are less efficient.",
    source="the sum rule of derivatives; the batch-size section of transformers' guides",
    page="accumulation.md",
)


@dataclass(frozen=True)
class StepResult:
    """What a step says about itself."""

    loss: float
    """Mean over the targets of all the step's micro-batches."""
    grad_norm: float
    """Euclidean norm of the gradient before clipping."""
    applied: bool
    """False where loss or gradient were not finite: the weights are as before."""
    grad_scale: float = 1.0
    """What the gradient is still to be multiplied by: clipping."""
    rescaled: bool = False
    """Not applied, and no failure: the loss scale of fp16 was too high, and has been lowered."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers; a step that is finite and was not applied is a loss spike."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def gradients(
    objective: Objective,
    batches: Sequence[Batch],
    precision: Precision,
    *,
    seed: int,
    step: int,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Leave in .grad the gradient of the mean loss over the step's targets; return that mean, () float32.

    The loss is a sum over targets divided by their count over all micro-batches: never a mean of means.
    `between` is called after each micro-batch but the last.
    """
    precision.begin(seed, step)
    n_targets = sum(objective.count(batch) for batch in batches)
    n_valid = max(n_targets, 1)
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        if number:
            between()
        with precision.forward():
            output = objective.forward(batch, seed=seed, step=step)
            with record_function("whet::loss"):
                loss = objective.loss_sum(output, batch) / n_valid
        precision.backward(loss)
        total = total.to(loss.device) + loss.detach()
    return total if n_targets else total + float("nan")  # nothing was learnt: 0 / 0, not a loss of 0


@record_function("whet::optimizer")
def examine(parameters: Sequence[nn.Parameter], loss: Tensor, max_grad_norm: float, precision: Precision) -> StepResult:
    """Unscale the gradient; return what the step will be, and what brings it down to max_grad_norm (0: nothing).

    A non-finite step must not be taken.
    """
    precision.unscale(parameters)
    norm = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    found = StepResult(loss=float(loss), grad_norm=norm, applied=False)
    scale = 1.0
    if found.finite and 0 < max_grad_norm < norm + 1e-6:  # the small number that torch adds before it divides
        scale = max_grad_norm / (norm + 1e-6)
    rescaled = precision.adapt() and math.isfinite(found.loss)
    return replace(found, applied=found.finite, grad_scale=scale, rescaled=rescaled)
