"""The state of an optimizer in a checkpoint: numbers and moments under the names of the model's parameters.

The keys are those of `torch.distributed.checkpoint`: `state.<parameter>.<moment>`. A moment keeps the shape that the
optimizer gives it, so tools can split and merge moments as they split and merge the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.train.checkpoint import optimizer_template
from whet.train.resume import schema
from whet.train.state import State

_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}
"""State of torch's optimizers that has the parameter's shape."""


class OptimizerState:
    """The state of one optimizer; `names` are those of its parameters, in the order of its groups."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer, self._names = optimizer, names

    def state(self) -> State:
        """Return `{"param_groups": [settings and names], "state": {name: moments and numbers}}`."""
        state = self._optimizer.state_dict()
        names = dict(zip(_indices(state["param_groups"]), self._names, strict=True))
        groups = [
            {**_numbers(group), "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "param_groups": groups,
            "state": {names[index]: _contiguous(values) for index, values in state["state"].items()},
        }

    def load_state(self, saved: State) -> None:
        """Restore the state of an optimizer over parameters of the same names; raises ValueError for any other."""
        fresh = self._optimizer.state_dict()["param_groups"]
        index_of = dict(zip(self._names, _indices(fresh), strict=True))
        groups = [_restored(group) for group in saved["param_groups"]]
        _require_same_names(groups, fresh, index_of)
        for group, new in zip(groups, fresh, strict=True):
            group["params"] = list(new["params"])
        unknown = sorted(saved["state"].keys() - index_of.keys())
        if unknown:
            raise ValueError(f"the saved optimizer has a state for {unknown[0]!r}, which it does not update here")
        parameters = dict(zip(self._names, parameters_of(self._optimizer), strict=True))
        _require_shapes(saved["state"], parameters)
        optimizer_template.require_like(self._optimizer, self._names, saved["state"])
        _require_all(saved["state"])
        _require_steps(saved["state"])
        schema.require_groups(groups, self._optimizer.param_groups)
        state = {index_of[name]: dict(values) for name, values in saved["state"].items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def names_in(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the optimizer's parameters in the model; one of another module is named by its index."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(one), f"parameter.{number}") for number, one in enumerate(parameters_of(optimizer))]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _indices(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [index for group in groups for index in group["params"]]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def _contiguous(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.contiguous()
    return {name: _contiguous(value) for name, value in values.items()} if isinstance(values, dict) else values


def _restored(group: dict[str, Any]) -> dict[str, Any]:
    lists = {name: value for name, value in group.items() if isinstance(value, list) and name != "params"}
    return group | {name: tuple(value) for name, value in lists.items()}  # JSON has no tuples


def _require_same_names(
    groups: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]], index_of: Mapping[str, int]
) -> None:
    """Require groups of the same parameters: the group decides their learning rate and decay."""
    if len(groups) != len(fresh):
        raise ValueError(f"the saved optimizer has {len(groups)} groups of parameters, this one {len(fresh)}")
    for number, (group, new) in enumerate(zip(groups, fresh, strict=True)):
        if [index_of.get(name) for name in group["params"]] != new["params"]:
            raise ValueError(f"group {number} of the saved optimizer holds other parameters")


def _require_shapes(state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Check the shapes. Torch does not, and its optimizers would write out of bounds."""
    for parameter, values in state.items():
        shape = tuple(parameters[parameter].shape)
        for name in _SHAPED & values.keys():
            if isinstance(values[name], Tensor) and tuple(values[name].shape) != shape:
                raise ValueError(f"{parameter} is {shape}, its saved {name} {tuple(values[name].shape)}")
            if isinstance(values[name], Tensor) and not _may_hold_moments(values[name], parameters[parameter]):
                raise ValueError(f"the saved {name} of {parameter} holds {values[name].dtype}")


def _may_hold_moments(tensor: Tensor, parameter: Tensor) -> bool:
    wider = tensor.dtype is torch.float64 and parameter.dtype is not torch.float64
    return (tensor.is_floating_point() and not wider) or tensor.dtype is torch.uint8  # the codes of 8-bit moments


def _require_all(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all named parameters have a state, or none of them."""
    empty = [name for name, values in state.items() if not values]
    if empty and len(empty) < len(state):
        raise ValueError(f"{empty[0]} has no saved state, others have")


def _require_steps(state: Mapping[str, Mapping[str, Any]]) -> None:
    for name, values in state.items():
        step = values.get("step", 0)
        if isinstance(step, Tensor) and (step.is_floating_point() or step.dtype is torch.int64):
            step = step.item() if step.numel() == 1 else math.nan
        if not isinstance(step, int | float) or not 0 <= step < schema.MOST or step != int(step):
            raise ValueError(f"the saved step of {name} is {str(values['step'])[:60]}")
