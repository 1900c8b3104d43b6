"""What an objective does: it makes batches of rows, runs the model on them and sums the losses of their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.data.padding import Padding
from whet.models.packed import PackedModel

IGNORED = -100
"""The label of a token that is no target, and the prediction for a place that is no token."""
Collate = Callable[[list[Any]], Mapping[str, Any]]
Rows = Sequence[int] | np.ndarray


class Objective(Protocol):
    """One way to train a model on rows."""

    packed: bool
    """Whether batches run without padding."""
    is_own_loss: bool
    """Whether the complete model is called with batches that its collator pads, and its own loss is trained."""

    @property
    def packed_model(self) -> PackedModel | None:
        """The model, where it reads batches without padding."""
        ...

    @property
    def padding(self) -> Padding:
        """How a padded run would pad rows, and which of that padding this loss counts."""
        ...

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        """Return these rows of the data set as a micro-batch.

        `padded_to` (rows,) is what a padded run would pad each row to; None: these rows are a batch of their own.
        """
        ...

    def count(self, batch: Batch) -> int:
        """Return how many targets the batch's loss is a sum over."""
        ...

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Return the model's output for the batch."""
        ...

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        """Return the sum of the losses of the batch's targets, () float32."""
        ...

    def loss_parts(self, output: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Return named parts of `loss_sum`, each () float32, which are logged next to it; most losses have none."""
        ...

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        """Return the output's predictions as arrays (rows, ...), places that are no token filled with -100."""
        ...


def teacher_of(objective: Objective) -> nn.Module | None:
    """Return the model that the objective runs on each batch next to the one that is trained; None if it has none."""
    return getattr(objective, "teacher", None)
