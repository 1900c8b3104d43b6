"""What `whet.optimize` changed in a model, for those who want to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whet.config.fields import PaddingInLoss
from whet.kernels.library import library
from whet.methods import fuse
from whet.methods.unpad import method as unpad
from whet.models import record
from whet.models.fused.layers import PlacedDropout
from whet.models.packed import GRAPHS, packed_model
from whet.objectives import heads
from whet.own_loop import curated, locate

_PADDING: dict[PaddingInLoss, str] = {
    "none": "no padding",
    "sampled": 'no padding (hidden states of padding tokens are approximate: padding="all" computes them)',
    "all": 'padding tokens computed (padding="all")',
}


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
    encoders: tuple[str, ...] = ("",)
    """The names of the changed models in the one that was given; empty for that one itself."""
    padding: PaddingInLoss = "none"
    """What a head that reads the states of padding tokens gets, as `whet.optimize` has it."""
    graphs: bool = False
    """Whether training passes on a GPU are launched as one."""

    def __str__(self) -> str:
        fused = fuse.in_words(self.fused, self.isa or "", self.called) if self.fused else "operators in plain torch"
        return f"{_PADDING[self.padding]}, {fused}{', CUDA graphs' if self.graphs else ''}"


def changes(model: Any) -> Changes | None:
    """Return what `optimize` changed in this model; None if nothing of it is in the model.

    Of several encoders inside one model the counts are added up. The modules that keep their own forward are those of
    this moment: adapters and hooks come and go.
    """
    found = {encoder.name: _changes(encoder.model) for encoder in locate.encoders_in(model)}
    changed = {name: one for name, one in found.items() if one is not None}
    if not changed:
        return None
    fused: Counter[str] = Counter()
    for one in changed.values():
        fused.update(one.fused)
    first = next(iter(changed.values()))
    return replace(
        first,
        dropouts=sum(one.dropouts for one in changed.values()),
        fused=dict(fused),
        called={
            f"{name}.{part}" if name else part: why for name, one in changed.items() for part, why in one.called.items()
        },
        encoders=tuple(changed),
    )


def may_show_padding(model: nn.Module) -> bool:
    """Return whether approximate states of padding tokens may reach more than a loss that leaves padding out.

    A head of a user's own may average all places of a row.
    """
    found = _changes(model)
    return found is not None and found.padding == "sampled" and heads.reads_beside(model) != "tokens"


def _changes(model: nn.Module) -> Changes | None:
    own = curated.changed(model)
    if own is not None:
        native = library() if own.fused else None
        isa = None if native is None else native.isa
        return Changes("curated-transformers", own.dropouts, own.fused, isa, own.dtype, called={})
    packed = packed_model(model)
    if packed is None or not unpad.is_on(packed.module):
        return None
    fused = fuse.changed_in(packed.module)
    native = None if fused is None else library()
    return Changes(
        attention_before=packed.attention_before,
        dropouts=sum(isinstance(module, PlacedDropout) for module in packed.module.modules()),
        fused=fused or {},
        isa=None if native is None else native.isa,
        dtype=unpad.dtype_of(packed.module),
        padding=unpad.padding_of(packed.module),
        called={} if fused is None else fuse.called(packed),
        graphs=record.read(packed.module, GRAPHS) is not None,
    )
