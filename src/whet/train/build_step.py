"""Chooses the version of each part of the step: whose loss it uses, and how gradients update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whet.data.batch import Batch
from whet.train.compat import user_loss
from whet.train.compat.public import PublicTrainer
from whet.train.run import Run
from whet.train.step import Gradients, ObjectiveGradients, StepLoss, StepParts, StepResult, Update


@dataclass(frozen=True)
class UserGradients:
    """Forward and backward through `training_step` and `compute_loss`, which users override."""

    trainer: PublicTrainer
    between: Callable[[], None]
    """Called between two micro-batches."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepLoss:
        return user_loss.gradients(self.trainer, batches, step=step, between=self.between)


def build(
    trainer: PublicTrainer, run: Run, update: Update, *,
    reject_spike: Callable[[StepResult], StepResult], between: Callable[[], None],
) -> StepParts:  # fmt: skip
    """Return the parts of this run's step. `between` is called between two micro-batches."""
    return StepParts(
        parameters=list(run.model.parameters()),  # a step skips those without a gradient
        gradients=_gradients(trainer, run, between),
        update=update,
        precision=trainer.precision,
        sync=trainer.sync,
        reject_spike=reject_spike,
        max_grad_norm=run.args.max_grad_norm,
    )


def _gradients(trainer: PublicTrainer, run: Run, between: Callable[[], None]) -> Gradients:
    if trainer.user_loss:
        return UserGradients(trainer, between)
    return ObjectiveGradients(
        objective=run.objective, precision=trainer.precision, seed=run.args.seed, sync=trainer.sync, between=between
    )
