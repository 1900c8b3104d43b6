"""AdamW with 8-bit moments over all tensors of a model in one native call."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whet.kernels.optimizer.adamw import Updated
from whet.kernels.reference import adamw_8bit as reference_8bit
from whet.kernels.specs import AdamWStep


class AdamW8bitTensors(Updated):
    """The tensors that one AdamW updates, with `first` and `second` (m and v) as codes."""

    operator = "adamw_8bit"

    def _fits(self) -> bool:
        return all(moment.codes.is_contiguous() for moment in (*self.first, *self.second))

    def _moments(self) -> dict[str, list[Tensor]]:
        return {
            "first": [m.codes for m in self.first],
            "second": [v.codes for v in self.second],
            "first_scales": [m.scales for m in self.first],
            "second_scales": [v.scales for v in self.second],
        }

    def _reference_update(self, rows: list[Any], rates: Sequence[tuple[float, float]], step: AdamWStep) -> None:
        reference_8bit.adamw_8bit(rows, rates, step)
