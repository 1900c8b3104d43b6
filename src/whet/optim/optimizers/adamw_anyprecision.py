"""AdamW with a chosen dtype for each part of its state, and compensated sums for parameters in bf16.

It replaces torchdistx's AnyPrecisionAdamW. Parameters in bf16 lose small updates to rounding; the compensation stores
the loss (Kahan 1965) and adds it once it is large enough. Unlike in torchdistx, weight decay is compensated as well: in
bf16 a factor of 1 - 1e-6 would be 1.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whet.optim.entry import Entry, Options, Request, Shapes, Stepping

_USUAL = {
    "use_kahan_summation": False,
    "momentum_dtype": "float32",
    "variance_dtype": "float32",
    "compensation_buffer_dtype": "bfloat16",
}
"""The defaults of transformers."""


class AnyPrecisionAdamW(Stepping):
    """AdamW whose moments and compensation are stored in the given dtypes; it computes in fp32."""

    def __init__(self, params: Any, options: Options, **adam: Any) -> None:
        super().__init__(params, {**adam, "weight_decay": 0.0})
        self.kahan: bool = options["use_kahan_summation"]
        names = ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
        self.dtypes: list[torch.dtype] = [getattr(torch, options[name]) for name in names]

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        grad = grad.float()
        state = self.state[parameter] or self._begin(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.copy_(mean.float().lerp(grad, 1 - beta1))
        square.copy_(square.float().mul(beta2).addcmul_(grad, grad, value=1 - beta2))
        root = square.float().div(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        move = mean.float().div(1 - beta1 ** state["step"]).div_(root).mul_(-group["lr"])
        move.sub_(parameter.float(), alpha=group["lr"] * group["weight_decay"])
        self._add(parameter, move, state)

    def _begin(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        momentum, variance, lost = self.dtypes
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(parameter, dtype=momentum)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=variance)
        if self.kahan:
            state["compensation"] = torch.zeros_like(parameter, dtype=lost)
        return state

    def _add(self, parameter: Tensor, move: Tensor, state: dict[str, Any]) -> None:
        if not self.kahan:
            parameter.copy_(parameter.float() + move)
            return
        wanted = move.add_(state["compensation"].float())
        before = parameter.float().clone()
        parameter.copy_(before + wanted)
        state["compensation"].copy_(wanted - (parameter.float() - before))


def build(request: Request) -> Optimizer:
    """Return AdamW with the dtypes of optim_args."""
    return AnyPrecisionAdamW(request.groups, {**_USUAL, **request.options}, **request.adam)


def state_bytes(shapes: Shapes, options: Options, _itemsize: int) -> int:
    """Two moments, and with use_kahan_summation the compensation, each in its dtype."""
    given = {**_USUAL, **options}
    names = ["momentum_dtype", "variance_dtype"]
    names += ["compensation_buffer_dtype"] if given["use_kahan_summation"] else []
    width = sum(getattr(torch, given[name]).itemsize for name in names)
    return sum(width * prod(shape) for shape in shapes)


OPTIMIZERS = (
    Entry(
        name="adamw_anyprecision",
        rule="AdamW",
        does="AdamW with a dtype for each part of the state, and compensated sums for bf16 weights",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; Kahan 1965",
        options={
            "use_kahan_summation": "bool",
            "momentum_dtype": "float32|bfloat16|float16",
            "variance_dtype": "float32|bfloat16|float16",
            "compensation_buffer_dtype": "float32|bfloat16|float16",
        },
        betas=True,
        epsilon=True,
        reads="element",
        replaces="torchdistx",
        kind=AnyPrecisionAdamW,
        build=build,
        state_bytes=state_bytes,
    ),
)
