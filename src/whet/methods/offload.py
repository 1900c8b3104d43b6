"""Activation offload: what backward will read waits in the host's memory instead of the GPU's."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.methods import counting
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.forwards import Replaced
from whet.models.view import ModelView

CARD = Card(
    name="offload",
    asked_by="activation_offload",
    does="Activations of a GPU wait for backward in the host's memory.",
    improves="memory",
    same_result="yes",
    hurts="When copying takes longer than the computation that hides it.",
    source="torch.autograd.graph.save_on_cpu of PyTorch",
    wanted_by="offload",
    page="memory.md#activation-checkpointing",
)
STAGE = Stage.PLACES


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Make the model's forward pass keep its activations in pinned host memory.

    Weights stay where they are. Losses and gradients do not change. Raises ConfigError for a model on the CPU.
    """
    if not settings.offload:
        return None
    restore(view)
    model = view.model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        raise ConfigError(
            what="activation_offload has nothing to do here",
            got=f"a model on {device}",
            why="it moves activations from a GPU to the host's memory, and on a CPU they are there already",
            fix="leave --activation_offload out; --gradient_checkpointing saves memory on a CPU",
        )
    replaced = Replaced()
    record.keep(model, CARD.name, (replaced, model.forward))
    replaced.put(model, MethodType(_forward, model))
    return Applied(CARD.name, "activations wait for backward in the host's memory")


def restore(view: ModelView) -> None:
    """Undo `apply` exactly."""
    before = record.take(view.model, CARD.name)
    if before is not None:
        before[0].undo()


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return the activations of the blocks, which move from the device to the host."""
    if not settings.offload:
        return Cost()
    moved = counting.kept(view, settings, operators=False).per_token
    return Cost(activation_bytes_per_token=-moved, host_bytes_per_token=moved)


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    run = record.read(self, CARD.name)[1]
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
