"""Activation offload: what backward will read waits in the host's memory instead of the GPU's."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whet.errors import ConfigError

_INNER = "whet_before_offload"


def apply(model: nn.Module) -> str:
    """Make the model's forward pass keep its activations in pinned host memory; return what was done, for the log.

    Weights stay where they are. Losses and gradients do not change. Raises ConfigError for a model on the CPU.
    """
    restore(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        raise ConfigError(
            what="activation_offload has nothing to do here",
            got=f"a model on {device}",
            why="it moves activations from a GPU to the host's memory, and on a CPU they are there already",
            fix="leave --activation_offload out; --gradient_checkpointing saves memory on a CPU",
        )
    model.__dict__[_INNER] = (model.__dict__.get("forward"), model.forward)
    model.forward = MethodType(_forward, model)
    return "activations wait for backward in the host's memory"


def restore(model: nn.Module) -> None:
    """Undo `apply`, exactly; a model without it stays as it is."""
    before = model.__dict__.pop(_INNER, None)
    if before is None:
        return
    model.__dict__.pop("forward", None)
    if before[0] is not None:
        model.forward = before[0]


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    run = self.__dict__[_INNER][1]
    if not (self.training and torch.is_grad_enabled()):
        return run(*args, **options)
    weights = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}

    def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.device.type == "cpu" or tensor.untyped_storage().data_ptr() in weights:
            return tensor.device, tensor
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
        return tensor.device, host.copy_(tensor)

    with saved_tensors_hooks(to_host, _back):
        return run(*args, **options)


def _back(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
