"""An optimizer of the registry: how it is built, and the size of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.optim.groups import parameter_groups, with_rates

Options = Mapping[str, Any]
"""The parsed `optim_args`."""


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
        return with_rates(groups, self.args.learning_rate, self.rates)

    @property
    def adam(self) -> dict[str, Any]:
        """The arguments of every AdamW."""
        args = self.args
        betas = (args.adam_beta1, args.adam_beta2)
        return {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}


Shapes = Sequence[Sequence[int]]
StateBytes = Callable[[Shapes, Options, int], int]
"""(shapes of the parameters, options, bytes per element) -> bytes of all tensors of the state."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One optimizer."""

    build: Callable[[Request], Optimizer]
    state_bytes: StateBytes


STEP_BYTES = 4
"""torch's optimizers count steps in a float32 tensor per parameter."""


WIDEST = 4
"""Bytes per element of the widest dtype that whet's own operators update."""


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
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        loaded.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def native_can_update(parameter: Tensor) -> bool:
    """Return whether whet's own operators can update this parameter: on the CPU, of a 32-bit or 16-bit dtype."""
    return parameter.device.type == "cpu" and parameter.dtype.itemsize <= WIDEST


def require_cpu(request: Request, name: str, instead: str) -> None:
    """Raise a ConfigError if a trainable parameter is not on the CPU, or has another dtype."""
    for group in request.groups:
        for parameter in group["params"]:
            if not native_can_update(parameter):
                raise ConfigError(
                    what=f"{name} cannot update these parameters",
                    got=f"{parameter.dtype} on {parameter.device}",
                    why="its operator works on the CPU, with 32-bit or 16-bit dtypes",
                    fix=f"use --optim {instead}",
                )
