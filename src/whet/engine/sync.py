"""What the ranks of a run decide together, and what they share: here that of a rank alone.

Every decision that must be the same on all ranks goes through `Sync`, and what a run holds through `Sharing`. A rank
alone has its own answers and everything; `many_ranks.py` and `zero.py` are imported for several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from whet.config.ranks import LostRankError
from whet.engine.update import OptimizerUpdate
from whet.errors import ConfigError
from whet.store import schema
from whet.store.save import Ranks
from whet.store.schema import Check
from whet.store.state import Stateful

T = TypeVar("T")


class Sync(Ranks):
    """The decisions that the ranks of a run take together. Of a rank alone, its own answers count."""

    group: Any = None
    """The exchanges between the ranks, a Group; None for a rank alone."""

    def begin(self, model: nn.Module) -> None:
        """Prepare to sum the gradients of this model; its weights become those of rank 0."""

    def lost(self, error: RuntimeError) -> LostRankError | None:
        """Return the error of a lost rank that torch's error stands for; None for any other."""
        return None

    def forward(self, work: Callable[[], T]) -> T:
        """Return what `work` returns: a forward pass with its loss, with the weights that it needs in their places."""
        return work()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Note that a micro-batch begins, and whether it is the last of its step."""

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on: that of the last micro-batch sums the gradients meanwhile."""
        return loss

    def total_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the sums over the ranks."""
        return list(counts)

    def in_order(self, own: Sequence[T], valid: Check = schema.anything) -> list[T]:
        """Return the results of all ranks in one order, where rank r has computed number r, r + n_ranks and so on.

        They are JSON or arrays, and `valid` holds of each, or the run ends.
        """
        return list(own)

    def copy_from_first(self, model: nn.Module) -> None:
        """Overwrite the weights with those of rank 0."""

    def total_targets(self, n_targets: int) -> int:
        """Return the number of targets of the step, summed over the ranks."""
        return n_targets

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the step, or a part of it: the sum of the ranks' shares."""
        return loss

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Finish the sum of .grad over the ranks. Called once per step, after the last backward pass."""

    def gradient_norm(self, norm: float) -> float:
        """Return the norm of the gradient over the shards of all ranks."""
        return norm

    def all_finite(self, finite: bool) -> bool:
        """Return whether loss and gradient are finite on every rank. A step is applied by all ranks or by none."""
        return finite

    def stop_signal(self, name: str | None) -> str | None:
        """Return the name of the signal that asked a rank to stop, or None."""
        return name

    def memory_shortage(self, shortage: str | None) -> str | None:
        """Return the memory shortage of any rank, or None."""
        return shortage

    def stop_early(self, wanted: bool) -> bool:
        """Return whether a callback of any rank ends the training."""
        return wanted

    def evaluate_now(self, due: bool) -> bool:
        """Return whether the ranks evaluate after this step."""
        return due

    def save_now(self, due: bool) -> bool:
        """Return whether the ranks save after this step."""
        return due

    def is_best(self, better: bool) -> bool:
        """Return whether this evaluation is the best of the run."""
        return better

    def precision(self, name: str) -> str:
        """Return the precision that all ranks compute in."""
        return name

    def micro_batch_rows(self, n_rows: int) -> int:
        """Return the most rows of a micro-batch that fit on every rank."""
        return n_rows


SHARED = "whet_shared"
"""Attribute of an optimizer that has a share of a run's state."""


class Sharing:
    """How the ranks share what a run holds: here each has everything."""

    is_on = False
    """Whether a rank alone has less than a checkpoint holds."""

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Share from now on. Model and optimizer are complete until then, and restored."""

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters whose gradients this rank has after a backward pass."""
        return list(model.parameters())

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of the optimizer's step."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which rank 0 has the complete model and state. All ranks enter it."""
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which each rank has the complete model. All ranks enter it."""
        return nullcontext()

    def finish(self) -> None:
        """Leave the complete model on each rank. All ranks call it."""

    def abandon(self) -> None:
        """End without the other ranks, unless `finish` was called: the model is refused from now on."""

    def update(self, alone: OptimizerUpdate) -> Any:
        """Return how gradients update the weights; `alone` is the update of a rank that has everything."""
        return alone

    def optimizer_part(self, alone: Stateful) -> Stateful:
        """Return the optimizer as a part of a checkpoint; `alone` is that of a rank that shares nothing."""
        return alone


def require_own_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer of the user's that an earlier training has shared out."""
    if hasattr(optimizer, SHARED):
        raise ConfigError(
            what="the optimizer has only this rank's share of an earlier training",
            got=type(optimizer).__name__,
            why="with zero_stage, fsdp or deepspeed each rank keeps the state of a part of the weights",
            fix="pass a new optimizer to each training, or train without zero_stage, fsdp and deepspeed",
        )


_left: WeakSet[nn.Module] = WeakSet()
"""Models of which a training that failed left each rank its share alone."""


def mark_unfinished(model: nn.Module) -> None:
    """Note that this model stays without the rows of the other ranks, which may be gone."""
    _left.add(model)


def require_complete(model: nn.Module) -> None:
    """Raise ConfigError if a training has left the model with the weights of this rank alone."""
    if model in _left:
        raise ConfigError(
            what="the model has only this rank's share of the weights",
            got="a model whose training failed",
            why="with zero_stage 2 and 3 the ranks bring the weights together at the end of a "
            "training, and an error of one rank ends it before that",
            fix="build a new model and trainer, and call train(resume_from_checkpoint=True) or load the newest "
            "checkpoint of the run; zero_stage 1 leaves each rank the complete weights",
        )
