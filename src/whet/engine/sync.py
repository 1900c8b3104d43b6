"""Makes the ranks of a run agree: every decision that must be the same on all ranks goes through here.

With one rank each answer is its own; `many_ranks.py` exchanges the answers. All ranks call each method at the same
points of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn

from whet.config.ranks import ALONE, Place
from whet.dist.group import Group, LostRankError
from whet.dist.messages import Check, anything

T = TypeVar("T")


class Sync(Protocol):
    """The decisions that the ranks of a run take together."""

    n_ranks: int
    place: Place

    @property
    def group(self) -> Group | None:
        """The exchanges between the ranks; None for a rank alone."""
        ...

    def begin(self, model: nn.Module) -> None:
        """Prepare to sum the gradients of this model; its weights become those of rank 0."""
        ...

    def lost(self, error: RuntimeError) -> LostRankError | None:
        """Return the error of a lost rank that torch's error stands for; None for any other."""
        ...

    def forward(self, work: Callable[[], T]) -> T:
        """Return what `work` returns: a forward pass with its loss, with the weights that it needs in their places."""
        ...

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Note that a micro-batch begins, and whether it is the last of its step."""
        ...

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on: that of the last micro-batch sums the gradients meanwhile."""
        ...

    def total_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the sums over the ranks."""
        ...

    def of_first(self, value: T, valid: Check) -> T:
        """Return the value of rank 0: JSON or arrays of which `valid` holds, or the run ends."""
        ...

    def gather(self, value: T, valid: Check, *, large: bool = False) -> list[T]:
        """Return the values of all ranks: JSON or arrays of which `valid` holds, or the run ends."""
        ...

    def in_order(self, own: Sequence[T], valid: Check = anything) -> list[T]:
        """Return the results of all ranks in one order, where rank r has computed number r, r + n_ranks and so on.

        They are JSON or arrays, and `valid` holds of each, or the run ends.
        """
        ...

    def copy_from_first(self, model: nn.Module) -> None:
        """Overwrite the weights with those of rank 0."""
        ...

    def wait(self) -> None:
        """Wait for all ranks."""
        ...

    def total_targets(self, n_targets: int) -> int:
        """Return the number of targets of the step, summed over the ranks."""
        ...

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the step, or a part of it: the sum of the ranks' shares."""
        ...

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Finish the sum of .grad over the ranks. Called once per step, after the last backward pass."""
        ...

    def gradient_norm(self, norm: float) -> float:
        """Return the norm of the gradient over the shards of all ranks."""
        ...

    def all_finite(self, finite: bool) -> bool:
        """Return whether loss and gradient are finite on every rank. A step is applied by all ranks or by none."""
        ...

    def stop_signal(self, name: str | None) -> str | None:
        """Return the name of the signal that asked a rank to stop, or None."""
        ...

    def memory_shortage(self, shortage: str | None) -> str | None:
        """Return the memory shortage of any rank, or None."""
        ...

    def stop_early(self, wanted: bool) -> bool:
        """Return whether a callback of any rank ends the training."""
        ...

    def evaluate_now(self, due: bool) -> bool:
        """Return whether the ranks evaluate after this step."""
        ...

    def save_now(self, due: bool) -> bool:
        """Return whether the ranks save after this step."""
        ...

    def is_best(self, better: bool) -> bool:
        """Return whether this evaluation is the best of the run."""
        ...

    def precision(self, name: str) -> str:
        """Return the precision that all ranks compute in."""
        ...

    def micro_batch_rows(self, n_rows: int) -> int:
        """Return the most rows of a micro-batch that fit on every rank."""
        ...


class OneRank:
    """The only rank of a run: its own answers count."""

    n_ranks = 1
    place = ALONE
    group = None

    def begin(self, model: nn.Module) -> None:
        pass

    def lost(self, error: RuntimeError) -> LostRankError | None:
        return None

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        pass

    def before_backward(self, loss: Tensor) -> Tensor:
        return loss

    def total_counts(self, counts: Sequence[int]) -> list[int]:
        return list(counts)

    def of_first(self, value: T, valid: Check) -> T:
        return value

    def gather(self, value: T, valid: Check, *, large: bool = False) -> list[T]:
        return [value]

    def in_order(self, own: Sequence[T], valid: Check = anything) -> list[T]:
        return list(own)

    def copy_from_first(self, model: nn.Module) -> None:
        pass

    def wait(self) -> None:
        pass

    def total_targets(self, n_targets: int) -> int:
        return n_targets

    def total_loss(self, loss: Tensor) -> Tensor:
        return loss

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def gradient_norm(self, norm: float) -> float:
        return norm

    def all_finite(self, finite: bool) -> bool:
        return finite

    def stop_signal(self, name: str | None) -> str | None:
        return name

    def memory_shortage(self, shortage: str | None) -> str | None:
        return shortage

    def stop_early(self, wanted: bool) -> bool:
        return wanted

    def evaluate_now(self, due: bool) -> bool:
        return due

    def save_now(self, due: bool) -> bool:
        return due

    def is_best(self, better: bool) -> bool:
        return better

    def precision(self, name: str) -> str:
        return name

    def micro_batch_rows(self, n_rows: int) -> int:
        return n_rows
