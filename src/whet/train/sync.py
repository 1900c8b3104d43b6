"""Makes the ranks of a run agree: every decision that must be the same on all ranks goes through here.

With one rank each answer is its own. A version for several ranks exchanges the answers, without a change of the
training loop. All ranks call each method at the same points of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Sync(Protocol):
    """The decisions that the ranks of a run take together."""

    n_ranks: int

    def total_targets(self, n_targets: Any) -> Any:
        """Return the number of targets of the step, summed over the ranks; an int or a tensor, as given."""
        ...

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the step, or a part of it: the sum of the ranks' shares."""
        ...

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum .grad over the ranks. Called once per step, after the last backward pass."""
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

    def total_targets(self, n_targets: Any) -> Any:
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
