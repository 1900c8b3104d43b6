"""Activation offload: what backward will read waits in the host's memory instead of the GPU's."""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.methods import counting
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.adapters import unwrapped
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
    device = next((parameter.device for parameter in view.model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        raise ConfigError(
            what="activation_offload has nothing to do here",
            got=f"a model on {device}",
            why="it moves activations from a GPU to the host's memory, and on a CPU they are there already",
            fix="leave --activation_offload out; --gradient_checkpointing saves memory on a CPU",
        )
    put(view)
    return Applied(CARD.name, "activations wait for backward in the host's memory")


def put(view: ModelView) -> None:
    """Offload what calls of the model keep, and calls of its encoder: losses of next tokens call that one alone."""
    restore(view)
    model = view.model
    encoder = getattr(unwrapped(model), "base_model", None)
    called = [model, *([encoder] if isinstance(encoder, nn.Module) and encoder is not model else [])]
    handles = [one.register_forward_pre_hook(_begin, prepend=True) for one in called]
    handles += [one.register_forward_hook(_end, always_call=True) for one in called]
    record.keep(model, CARD.name, handles)


def restore(view: ModelView) -> None:
    """Undo `apply` exactly."""
    for handle in record.take(view.model, CARD.name) or ():
        handle.remove()


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return the activations of the blocks, which move from the device to the host."""
    if not settings.offload:
        return Cost()
    moved = counting.kept(view, settings, operators=False).per_token
    return Cost(activation_bytes_per_token=-moved, host_bytes_per_token=moved)


_Call = tuple[nn.Module, AbstractContextManager[Any]]
_CALLS: ContextVar[tuple[_Call, ...]] = ContextVar("whet_offloading_calls", default=())
"""The running calls that offload, of which the innermost is the last one."""


def _begin(module: nn.Module, _: Any) -> None:
    keeps = module.training and torch.is_grad_enabled()
    context = saved_tensors_hooks(partial(_to_host, _weights(module)), _back) if keeps else nullcontext()
    context.__enter__()
    _CALLS.set((*_CALLS.get(), (module, context)))


def _end(module: nn.Module, *_: Any) -> None:
    calls = _CALLS.get()
    if calls and calls[-1][0] is module:  # a hook before `_begin` may have failed
        _CALLS.set(calls[:-1])
        calls[-1][1].__exit__(None, None, None)


def _weights(module: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


def _to_host(weights: Set[int], tensor: Tensor) -> tuple[torch.device, Tensor]:
    if tensor.device.type == "cpu" or tensor.untyped_storage().data_ptr() in weights:
        return tensor.device, tensor
    host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
    return tensor.device, host.copy_(tensor)


def _back(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
