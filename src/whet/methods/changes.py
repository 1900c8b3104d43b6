"""What `whet.optimize` changed in a model, for those who want to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from whet.methods import fuse
from whet.models.packed import PackedModel, PlacedDropout


@dataclass(frozen=True)
class Changes:
    """What is different in the model since `whet.optimize`; its weights and their names are not."""

    attention_before: str
    """The attention implementation that whet's took the place of."""
    dropouts: int
    """Dropout modules whose masks now are functions of their place."""
    fused: Mapping[str, int]
    """How many modules of each class run whet's native operators; none: the operators run in plain torch."""
    isa: str | None
    """The instruction set of the native operators."""
    dtype: torch.dtype | None
    """What the encoder's products compute in; None: what they did before."""
    called: Mapping[str, str]
    """Modules that keep their own forward, by name, and why: subclasses, adapters, hooks, as they are now."""

    def __str__(self) -> str:
        applied = fuse.Applied(dict(self.fused), self.isa or "", self.called)
        return f"no padding, {applied if self.fused else 'operators in plain torch'}"


def of(packed: PackedModel, applied: fuse.Applied | None, dtype: torch.dtype | None) -> Changes:
    """Return what was changed in this model."""
    return Changes(
        attention_before=packed.attention_before,
        dropouts=sum(isinstance(module, PlacedDropout) for module in packed.module.modules()),
        fused={} if applied is None else applied.changed,
        isa=None if applied is None else applied.isa,
        dtype=dtype,
        called={} if applied is None else fuse.called(packed),
    )
