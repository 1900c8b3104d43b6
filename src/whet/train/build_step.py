"""Chooses the version of each part of the step: what adds to its loss, and how gradients update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from whet.train.compat.public import PublicTrainer
from whet.train.compat.user_loss import SmoothedLoss
from whet.train.routing import NoExperts, routing_of
from whet.train.run import Run
from whet.train.step import Gradients, ObjectiveGradients, StepParts, StepResult, Update
from whet.train.trunk.choose import trunk_of


def build(
    trainer: PublicTrainer, run: Run, update: Update, parameters: Sequence[nn.Parameter], *,
    reject_spike: Callable[[StepResult], StepResult], between: Callable[[], None],
) -> StepParts:  # fmt: skip
    """Return the parts of this run's step. `between` is called between two micro-batches."""
    return StepParts(
        parameters=parameters,  # a step skips those without a gradient
        gradients=_gradients(trainer, run, between),
        update=update,
        precision=trainer.precision,
        sync=trainer.sync,
        reject_spike=reject_spike,
        max_grad_norm=run.args.max_grad_norm,
    )


def _gradients(trainer: PublicTrainer, run: Run, between: Callable[[], None]) -> Gradients:
    balanced = not isinstance(run.objective, SmoothedLoss)  # a model with a balance loss is refused there
    return ObjectiveGradients(
        objective=run.objective, precision=trainer.precision, seed=run.args.seed, sync=trainer.sync,
        routing=routing_of(run.model) if balanced else NoExperts(), trunk=trunk_of(run), between=between,
    )  # fmt: skip
