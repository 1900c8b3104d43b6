"""Chooses the version of each part of the step: whose loss it uses, and how gradients update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from whet.data.batch import Batch
from whet.errors import ConfigError
from whet.train.compat import user_loss
from whet.train.compat.public import PublicTrainer
from whet.train.routing import require_whets_loss, routing_of
from whet.train.run import Run
from whet.train.step import Gradients, ObjectiveGradients, StepLoss, StepParts, StepResult, Update
from whet.train.trunk.choose import trunk_of


@dataclass(frozen=True)
class UserGradients:
    """Forward and backward through `training_step` and `compute_loss`, which users override."""

    trainer: PublicTrainer
    between: Callable[[], None]
    """Called between two micro-batches."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepLoss:
        return user_loss.gradients(self.trainer, batches, step=step, between=self.between)


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


def require_same_loss(trainer: PublicTrainer, run: Run) -> None:
    """Raise ConfigError if the Trainer has another loss than the run began with."""
    if trainer.objective is not run.objective:
        raise ConfigError(
            what=f"the loss of {type(trainer).__name__} changed while a training ran",
            why="its methods were replaced, and a training chooses its loss at the start",
            fix="replace compute_loss and the methods around it before train()",
        )


def _gradients(trainer: PublicTrainer, run: Run, between: Callable[[], None]) -> Gradients:
    trunk = trunk_of(trainer, run)
    if trainer.user_loss:
        require_whets_loss(run.model)
        return UserGradients(trainer, between)
    return ObjectiveGradients(
        objective=run.objective, precision=trainer.precision, seed=run.args.seed, sync=trainer.sync,
        routing=routing_of(run.model), trunk=trunk, between=between,
    )  # fmt: skip
