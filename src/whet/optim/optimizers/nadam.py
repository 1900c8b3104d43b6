"""NAdam (Dozat 2016): Adam with Nesterov's momentum, whose factor rises over the first steps; torch's."""

from __future__ import annotations

from typing import Any

import torch

from whet.optim.entry import Entry, keep_dtypes


class NAdam(torch.optim.NAdam):
    """torch's NAdam; `load_state_dict` keeps the product of the factors in float32, which torch rounds to bf16."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        keep_dtypes(self)


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
        moments=2,
        scalars=2,
        kind=NAdam,
    ),
)
