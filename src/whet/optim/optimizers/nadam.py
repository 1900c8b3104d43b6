"""NAdam (Dozat 2016): Adam with Nesterov's momentum, whose factor rises over the first steps; torch's."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from whet.optim.entry import STEP_BYTES, Entry, Options, Shapes, keep_dtypes

_PRODUCT_BYTES = 4
"""The product of the momentum factors so far, a float32 tensor per parameter."""


class NAdam(torch.optim.NAdam):
    """torch's NAdam; `load_state_dict` keeps the product of the factors in float32, which torch rounds to bf16."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        keep_dtypes(self)


def state_bytes(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """Two moments as wide as the parameter, the step and the product of the momentum factors."""
    return sum(2 * itemsize * prod(shape) + STEP_BYTES + _PRODUCT_BYTES for shape in shapes)


OPTIMIZERS = (
    Entry(
        name="nadam",
        rule="NAdam",
        does="NAdam of torch: Adam with Nesterov's momentum; weight decay is added to the gradient unless decoupled",
        source="Dozat 2016; torch.optim.NAdam",
        options={"momentum_decay": "float", "decoupled_weight_decay": "bool"},
        betas=True,
        epsilon=True,
        reads="element",
        kind=NAdam,
        state_bytes=state_bytes,
    ),
)
