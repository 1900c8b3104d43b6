"""What an optimizer reads to update an element: that element, its tensor, or all tensors.

One that reads all tensors, such as Prodigy with its common step size, cannot work on the share of a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.optim import registry
from whet.optim.entry import Entry

READS = "whet_reads"
"""Attribute by which an optimizer of others says what its updates read: "element" or "tensor"."""
_READY_MADE: Mapping[type[Optimizer], str] = {
    torch.optim.Adam: "element",
    **dict.fromkeys(
        (torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
         torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon), "tensor"),
}  # fmt: skip
"""Classes of torch that no row of the registry has."""
_BY_TENSOR_ELSEWHERE = (
    ("bitsandbytes.optim.", ""), ("torchao.optim.adam", ""), ("apex.optimizers.fused_adam", "FusedAdam"),
    ("transformers.optimization", "Adafactor"),
)  # fmt: skip
"""Beginning of the module and name of classes that need not be installed; an empty name stands for each."""


def unit_of(optimizer: Optimizer) -> int | None:
    """Return how many elements must stay together when a tensor is cut; None: all of them."""
    if _reads(optimizer) == "element":
        return 1
    return next((one.block for one in _entries_of(type(optimizer)) if one.block is not None), None)


def _entries_of(kind: type[Optimizer]) -> list[Entry]:
    """Return the rows of the registry for this class: those of its file, or of all files for a class of torch."""
    home = kind.__module__
    own: Iterable[Entry] = getattr(sys.modules.get(home), "OPTIMIZERS", ()) if home.startswith("whet.") else ()
    return [one for one in (registry.entries() if home.startswith("torch.") else own) if one.kind is kind]


def require_known(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that may read all tensors for an update, as nobody has said otherwise."""
    kind = type(optimizer)
    if _reads(optimizer) is not None:
        return
    raise ConfigError(
        what="zero_stage does not go with this optimizer",
        got=f"{kind.__module__}.{kind.__qualname__}",
        why="each rank would give it some of the weights, and whet does not know whether its updates need all of them",
        fix="leave --zero_stage, --fsdp and --deepspeed out, or use one of whet's own --optim names, such as "
        "adamw_whet; an optimizer of your own says"
        f' {READS} = "element" (it reads the element that it updates, and its state) or "tensor" (that tensor)',
    )


def _reads(optimizer: Optimizer) -> str | None:
    """Return "element" or "tensor"; None: nobody has said."""
    kind = type(optimizer)
    if (known := next((one.reads for one in _entries_of(kind)), _READY_MADE.get(kind))) is not None:
        return known
    if any(kind.__module__.startswith(m) and name in ("", kind.__name__) for m, name in _BY_TENSOR_ELSEWHERE):
        return "tensor"
    says = getattr(optimizer, READS, None)
    return says if says in ("element", "tensor") else None
