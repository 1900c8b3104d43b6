"""A copy of an encoder to experiment on: the real modules and configuration, and random weights that layers share.

Random weights, because those of the model may hide what it does: a bias table that starts at zero adds nothing yet.
Shared, because two weights of one shape and kind are one tensor in the copy: the memory of a proof is about that of one
layer and the embeddings. Every layer is there, with its own settings, since layers may alternate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Key = tuple[tuple[int, ...], str]


def stand_in(model: nn.Module, seed: int = 0) -> tuple[Any, Mapping[str, nn.Parameter]]:
    """Return a copy in float32 on the CPU, without hooks, in evaluation mode; and its distinct weights by name.

    Draws from torch's generator: the caller keeps its state. Raises whatever copying an object may raise.
    """
    torch.manual_seed(seed)
    shared: dict[_Key, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    distinct: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=True):
        kind = _kind(name, parameter)
        key = (tuple(parameter.shape), kind)
        if key not in shared:
            shared[key] = distinct[name] = nn.Parameter(_drawn(parameter.shape, kind))
        memo[id(parameter)] = shared[key]
    made: Any = copy.deepcopy(model, memo)
    made.cpu()
    for module in made.modules():
        _forget(module)
    return made.eval(), distinct


def _forget(module: nn.Module) -> None:
    """Remove what users have hung on the module, and bring its buffers to float32."""
    for hooks in _HOOKS:
        getattr(module, hooks).clear()
    if getattr(module, "gradient_checkpointing", False):
        setattr(module, "gradient_checkpointing", False)  # noqa: B010
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.float()


def _kind(name: str, parameter: Tensor) -> str:
    if parameter.dim() > 1:
        return "table" if "embed" in name or "bias" in name else "matrix"
    return "bias" if name.endswith("bias") else "scale"


def _drawn(shape: torch.Size, kind: str) -> Tensor:
    """Return values of the size that trained weights have; norms scale by about 1."""
    values = torch.randn(shape)
    if kind == "matrix":
        return values * shape[-1] ** -0.5
    return {"table": values * 0.7, "bias": values * 0.3, "scale": 1 + values * 0.2}[kind]
