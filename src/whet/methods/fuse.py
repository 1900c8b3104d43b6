"""Fused operators between the matrix products of a packed model, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.layers.embedding import RowGradient
from whet.kernels.library import library
from whet.models import fused
from whet.models.binding import bind, bound
from whet.models.fused import GRADIENT, PLACEMENT, part_of
from whet.models.packed import PackedModel


@dataclass(frozen=True)
class Applied:
    """What the method changed."""

    changed: dict[str, int]
    """How many modules of each class run fused."""
    isa: str
    """The instruction set of the native library."""
    called: Mapping[str, str]
    """Submodules of these that are called as they are, by name, and why."""

    def __str__(self) -> str:
        text = f"fused operators in {sum(self.changed.values())} modules ({self.isa})"
        return f"{text}, but not in {in_words(self.called)}" if self.called else text


def possible(packed: PackedModel) -> bool:
    """Return whether the operators can serve this model: it is on the CPU and the native library is there."""
    on_cpu = all(parameter.device == torch.device("cpu") for parameter in packed.module.parameters())
    return on_cpu and library() is not None


def apply(packed: PackedModel, *, row_gradients: bool = True) -> Applied:
    """Put whet's operators into the model. Weights, their names and the saved form stay as they are.

    A module that is more than its class is, by a hook or an adapter say, is still called; each pass looks again.
    `row_gradients` keeps the word table's gradient between steps and touches only the rows in use.
    """
    native = library()
    assert native is not None
    changed: Counter[str] = Counter()
    for module in packed.module.modules():
        part = part_of(module)
        if part is not None and ("forward" not in module.__dict__ or fused.is_fused(module)):
            module.__dict__[PLACEMENT] = packed.placement
            module.forward = bind(part.forward, module)
            changed[type(module).__name__] += 1
        table: Any = getattr(module, "word_embeddings", None)
        if row_gradients and type(table) is nn.Embedding and _trained_alone(table.weight, packed.module):
            setattr(table, GRADIENT, RowGradient(table.weight))
    return Applied(dict(changed), native.isa, called(packed))


def called(packed: PackedModel) -> dict[str, str]:
    """Return which modules the operators could take the place of and do not, as the model is now, and why."""
    found = {}
    for name, module in packed.module.named_modules():
        if PLACEMENT in module.__dict__ and _is_whets(module):
            found |= {f"{name}.{path}": why for path, why in fused.called(module).items()}
        elif part_of(module) is not None and not _is_whets(module):
            found[name] = "has a forward of its own"
    return found


def _is_whets(module: nn.Module) -> bool:
    """Return whether the module has a forward that whet gave it, or none of its own."""
    forward = bound(module)
    inner = getattr(forward, "func", forward)
    return forward is None or getattr(inner, "__module__", "").startswith("whet.")


def in_words(called: Mapping[str, str]) -> str:
    """Return modules that are called, in short: `query, value (24: is a Linear of peft)`."""
    by_reason: dict[str, list[str]] = {}
    for name, why in called.items():
        by_reason.setdefault(why, []).append(name.rpartition(".")[2])
    return "; ".join(f"{', '.join(dict.fromkeys(names))} ({len(names)}: {why})" for why, names in by_reason.items())


def restore(packed: PackedModel) -> None:
    """Take the operators out again, exactly."""
    for module in packed.module.modules():
        module.__dict__.pop(PLACEMENT, None)
        module.__dict__.pop(GRADIENT, None)
        if fused.is_fused(module):
            del module.forward


def _trained_alone(weight: Tensor, module: nn.Module) -> bool:
    """Return whether the weight is trained, and no output layer shares it: its gradient would have no zero rows."""
    holders = [part for part in module.modules() if any(own is weight for own in part.parameters(recurse=False))]
    return weight.requires_grad and len(holders) == 1
