"""What the passes of a run take for the results of its frozen layers; here they compute them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from whet.data.batch import Batch


class StepTrunk(Protocol):
    """What passes of a step take for the results of the frozen layers."""

    def of(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the context of the forward pass of a batch."""
        ...


class Computed:
    """The frozen layers, if there are any, run in each pass."""

    def of(self, batch: Batch) -> AbstractContextManager[object]:
        return nullcontext()
