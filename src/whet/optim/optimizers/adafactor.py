"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): stores only row and column means of a matrix's second moment.

Defaults are those of transformers: steps of the schedule's size, not scaled by the parameter. For the paper's own
steps, use optim_args relative_step=true,scale_parameter=true, learning_rate 1e-2 and lr_scheduler_type constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whet.optim.entry import Entry, Options, Request, Shapes, Stepping

_USUAL = {
    "scale_parameter": False,
    "relative_step": False,
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "eps1": 1e-30,
    "eps2": 1e-3,
}


class Adafactor(Stepping):
    """Algorithms 4 and 5 of the paper.

    `relative_step`: the step is min(learning rate, 1 / sqrt(t)). `scale_parameter`: it is multiplied by the parameter's
    root mean square, at least eps2. `clip_threshold`: largest root mean square of an update. `decay_rate`:
    the second moment keeps 1 - t ** decay_rate. `beta1`: adds a first moment, which takes memory.
    """

    def __init__(self, params: Any, lr: float, options: Options) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **options})

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        grad = grad.float()
        state = self.state[parameter] or self._begin(parameter, group)
        state["step"] += 1
        rate = _rate(parameter, group, state["step"])
        update = _divided_by_root(grad, state, 1.0 - state["step"] ** group["decay_rate"], group["eps1"])
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if "exp_avg" in state:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if parameter.dtype == torch.float32:
            parameter.mul_(1.0 - group["weight_decay"] * rate).sub_(update)
        else:
            parameter.copy_(parameter.float().mul_(1.0 - group["weight_decay"] * rate).sub_(update))

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state, shape = self.state[parameter], parameter.shape
        state["step"] = 0
        make = {"dtype": torch.float32, "device": parameter.device}
        if len(shape) >= 2:
            state["exp_avg_sq_row"] = torch.zeros(shape[:-1], **make)
            state["exp_avg_sq_col"] = torch.zeros(shape[:-2] + shape[-1:], **make)
        else:
            state["exp_avg_sq"] = torch.zeros(shape, **make)
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros(shape, **make)
        return state


def _rate(parameter: Tensor, group: dict[str, Any], step: int) -> float | Tensor:
    rate = min(group["lr"], 1 / sqrt(step)) if group["relative_step"] else group["lr"]
    return rate * _rms(parameter.float()).clamp_(min=group["eps2"]) if group["scale_parameter"] else rate


def _divided_by_root(grad: Tensor, state: dict[str, Any], keep: float, eps: float) -> Tensor:
    """Update the second moment; return grad divided by its root."""
    square = grad.square().add_(eps)
    if "exp_avg_sq" in state:
        return grad * state["exp_avg_sq"].lerp_(square, 1 - keep).rsqrt()
    row = state["exp_avg_sq_row"].lerp_(square.mean(-1), 1 - keep)
    column = state["exp_avg_sq_col"].lerp_(square.mean(-2), 1 - keep)
    del square  # a table's is as large as its gradient
    rows = (row / row.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return grad.mul(rows).mul_(column.rsqrt().unsqueeze(-2))


def _rms(x: Tensor) -> Tensor:
    return x.norm() / sqrt(x.numel())


def build(request: Request) -> Optimizer:
    """Return Adafactor with the options of optim_args."""
    return Adafactor(request.groups, request.args.learning_rate, {**_USUAL, **request.options})


def state_bytes(shapes: Shapes, options: Options, _itemsize: int) -> int:
    """fp32: one number per row and per column of a matrix, per element of a vector."""
    first = sum(prod(shape) for shape in shapes) if options.get("beta1") is not None else 0
    return 4 * (first + sum(_second(shape) for shape in shapes))


def _second(shape: Sequence[int]) -> int:
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod([*shape[:-2], shape[-1]])


OPTIMIZERS = (
    Entry(
        name="adafactor",
        rule="Adafactor",
        does="Adafactor as transformers sets it: one number per row and column of a matrix; needs a warm-up",
        source="Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5",
        options={
            "scale_parameter": "bool",
            "relative_step": "bool",
            "clip_threshold": "float",
            "decay_rate": "float",
            "beta1": "float",
            "eps1": "float",
            "eps2": "float",
        },
        claim="less memory (the guides say: over 12 GB for 3 billion); may converge slower",
        kind=Adafactor,
        build=build,
        state_bytes=state_bytes,
    ),
)
