"""What the registry has of an optimizer: a row with the code that builds it, from what, and whet's base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import Row

Options = Mapping[str, Any]
"""The parsed `optim_args`."""
Shapes = Sequence[Sequence[int]]
StateBytes = Callable[[Shapes, Options, int], int]
"""(shapes of the parameters, options, bytes per element) -> bytes of all tensors of the state."""

STEP_BYTES = 4
"""torch's optimizers count steps in a float32 tensor for each parameter."""
_WIDEST = 4
"""Bytes per element of the widest dtype that whet's own operators update."""
_SPARED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names without decay, of parameters and modules above them, as in transformers' Trainer.get_decay_parameter_names."""


@dataclass(frozen=True, kw_only=True)
class Entry(Row):
    """One optimizer: the constants of its row, which are read without torch, and its code."""

    state_bytes: StateBytes | None = None
    """Counts the bytes of its state; None: those of the row's `moments` and `scalars`."""
    kind: type[Optimizer] | None = None
    """Its class; None: it is another package's, or that of the one that it stands for."""
    build: Callable[[Request], Optimizer] | None = None
    """Builds it; None: the class takes the groups and the settings of `Request`."""
    block: int | None = None
    """How many elements share a number of the state, and stay together when ranks cut a tensor; None: not cut so."""
    stands_for: Callable[[Iterable[Tensor]], str] | None = None
    """Returns the name of the optimizer to use for these parameters."""
    matrices: Callable[[nn.Module], set[int]] | None = None
    """Returns the ids of the parameters whose state is that of a matrix; None: every matrix."""


def bytes_of(shapes: Shapes, itemsize: int, *, moments: int, scalars: int) -> int:
    """Return the bytes of a state of some tensors as wide as the parameter, and some float32 numbers."""
    return sum(moments * itemsize * prod(shape) + scalars * STEP_BYTES for shape in shapes)


@dataclass(frozen=True)
class Request:
    """What to optimise, and how."""

    model: nn.Module
    args: TrainingArguments
    options: Options = field(default_factory=dict)
    rates: Mapping[int, float] | None = None
    """The share of the learning rate of each parameter, by its id; None: all have the same."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The trainable parameters: with weight decay, and without."""
        groups = parameter_groups(self.model, self.args.weight_decay)
        return groups if self.rates is None else _with_rates(groups, self.args.learning_rate, self.rates)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in the order of the groups."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @property
    def adam(self) -> dict[str, Any]:
        """The arguments of every AdamW."""
        return adam_settings(self.args)


def adam_settings(args: Any) -> dict[str, Any]:
    """Return the arguments of every AdamW."""
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with weight decay and without, for any torch optimizer.

    As in transformers: no decay for the parameters of nn.LayerNorm, nor for names that say bias or norm. So all
    parameters of a model whose own name says layernorm go without.
    """
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _SPARED))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _with_rates(
    groups: Sequence[dict[str, Any]], learning_rate: float, rates: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Return the groups, split into groups with a learning rate of their own, the highest rate first.

    `rates` has the share of `learning_rate` of each parameter by its id.
    """
    split = [
        {**group, "params": [one for one in group["params"] if rates[id(one)] == rate], "lr": learning_rate * rate}
        for rate in sorted({*rates.values()}, reverse=True)
        for group in groups
    ]
    return [group for group in split if group["params"]]


def native_can_update(parameter: Tensor) -> bool:
    """Return whether whet's own operators can update this parameter: on the CPU, of a 32-bit or 16-bit dtype."""
    return parameter.device.type == "cpu" and native_takes(parameter.dtype.itemsize)


def native_takes(itemsize: int) -> bool:
    """Return whether whet's own operators take elements of this many bytes."""
    return itemsize <= _WIDEST


class Stepping(Optimizer):
    """The base of whet's own optimizers: it defines `_update` for one parameter, or `_update_all` for all of them.

    `load_state_dict` keeps the dtype of every tensor.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        keep_dtypes(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._update_all()
        return loss

    def _update_all(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def keep_dtypes(optimizer: Optimizer) -> None:
    """Make `load_state_dict` keep the dtype of every tensor; torch would cast all of them to the parameter's."""
    loaded: dict[str, Any] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        loaded.update(state_dict)

    def after(optimizer: Optimizer) -> None:
        names = [name for group in loaded["param_groups"] for name in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            for key, value in loaded["state"].get(name, {}).items():
                if isinstance(value, Tensor):
                    device = parameter.device if value.dim() else value.device  # counts of steps are on the CPU
                    optimizer.state[parameter][key] = value.to(device, copy=True)
        loaded.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
