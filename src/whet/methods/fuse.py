"""Fused operators between the matrix products of a packed model, on a CPU."""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.fused_embedding import RowGradient
from whet.kernels.library import library
from whet.models.fused import FORWARDS, GRADIENT, KINDS
from whet.models.packed import PackedModel

_ACTIVATIONS = ("intermediate_act_fn", "activation")


@dataclass(frozen=True)
class Applied:
    """What the method changed."""

    changed: dict[str, int]
    """How many modules of each class run fused."""
    isa: str
    """The instruction set of the native library."""

    def __str__(self) -> str:
        return f"fused operators in {sum(self.changed.values())} modules ({self.isa})"


def possible(packed: PackedModel) -> bool:
    """Return whether the operators can serve this model: it is on the CPU and the native library is there."""
    on_cpu = all(parameter.device == torch.device("cpu") for parameter in packed.module.parameters())
    return on_cpu and library() is not None


def apply(packed: PackedModel, *, row_gradients: bool = True) -> Applied:
    """Put whet's operators into the model. Weights, their names and the saved form stay as they are.

    `row_gradients` keeps the word table's gradient between steps and touches only the rows in use; it bypasses hooks on
    that gradient, so loops that are not whet's go without.
    """
    native = library()
    assert native is not None
    changed: dict[str, int] = {}
    for module in packed.module.modules():
        name = type(module).__name__
        if name in FORWARDS and _has_operator(module):
            module.forward = MethodType(FORWARDS[name], module)
            changed[name] = changed.get(name, 0) + 1
        table = getattr(module, "word_embeddings", None)
        if row_gradients and isinstance(table, nn.Embedding) and _trained_alone(table.weight, packed.module):
            setattr(table, GRADIENT, RowGradient(table.weight))
    return Applied(changed, native.isa)


def restore(packed: PackedModel) -> None:
    """Take the operators out again, exactly."""
    for module in packed.module.modules():
        module.__dict__.pop("forward", None)
        module.__dict__.pop(GRADIENT, None)


def _trained_alone(weight: Tensor, module: nn.Module) -> bool:
    """Return whether the weight is trained, and no output layer shares it: its gradient would have no zero rows."""
    holders = [part for part in module.modules() if any(own is weight for own in part.parameters(recurse=False))]
    return weight.requires_grad and len(holders) == 1


def _has_operator(module: Any) -> bool:
    """Return whether the module's activation, if it has one, is one of the operators'."""
    holder = getattr(module, "ffn", module)
    found = [getattr(m, name) for m in (module, holder) for name in _ACTIVATIONS if hasattr(m, name)]
    return all(type(activation).__name__ in KINDS for activation in found)
