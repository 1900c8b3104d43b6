"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): steps of one size, by the sign of the mean gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.optim.entry import Entry, Stepping


class Lion(Stepping):
    """One moment in the parameter's dtype. Use learning rates 3 to 10 times smaller than AdamW's, and more decay."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        direction = mean.lerp(grad, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        mean.lerp_(grad, 1 - beta2)


OPTIMIZERS = (
    Entry(
        name="lion_32bit",
        rule="Lion",
        does="Lion: steps of one size, by the sign; takes a third to a tenth of AdamW's learning rate",
        source="Chen et al. 2023, arXiv:2302.06675, algorithm 2",
        betas=True,
        reads="element",
        moments=1,
        kind=Lion,
    ),
)
