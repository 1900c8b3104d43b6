"""What an optimizer reads to update an element: that element, its tensor, or all tensors.

One that reads all tensors, such as Prodigy with its common step size, cannot work on the share of a rank.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.kernels.adamw import BLOCK
from whet.optim.optimizers.adafactor import Adafactor
from whet.optim.optimizers.anyprecision import AnyPrecisionAdamW
from whet.optim.optimizers.lion import Lion
from whet.optim.optimizers.muon import MuonAndAdamW
from whet.optim.optimizers.native import WhetAdamW, WhetAdamW8bit

_BY_ELEMENT: tuple[type[Optimizer], ...] = (
    WhetAdamW, AnyPrecisionAdamW, Lion, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop,
)  # fmt: skip
_BY_TENSOR: tuple[type[Optimizer], ...] = (
    WhetAdamW8bit, Adafactor, MuonAndAdamW,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon,
)  # fmt: skip
_BY_TENSOR_ELSEWHERE = (
    ("bitsandbytes.optim.", ""), ("torchao.optim.adam", ""), ("apex.optimizers.fused_adam", "FusedAdam"),
    ("transformers.optimization", "Adafactor"),
)  # fmt: skip
"""Beginning of the module and name of classes that need not be installed; an empty name stands for each."""
READS = "whet_reads"
"""Attribute by which an optimizer of others says what its updates read: "element" or "tensor"."""


def unit_of(optimizer: Optimizer) -> int | None:
    """Return how many elements must stay together when a tensor is cut; None: all of them."""
    if type(optimizer) in _BY_ELEMENT or getattr(optimizer, READS, None) == "element":
        return 1
    return BLOCK if type(optimizer) is WhetAdamW8bit else None


def require_known(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that may read all tensors for an update, as nobody has said otherwise."""
    kind = type(optimizer)
    elsewhere = any(kind.__module__.startswith(m) and name in ("", kind.__name__) for m, name in _BY_TENSOR_ELSEWHERE)
    says = getattr(optimizer, READS, None) in ("element", "tensor")
    if kind in _BY_ELEMENT or kind in _BY_TENSOR or elsewhere or says:
        return
    raise ConfigError(
        what="zero_stage does not go with this optimizer",
        got=f"{kind.__module__}.{kind.__qualname__}",
        why="each rank would give it some of the weights, and whet does not know whether its updates need all of them",
        fix="leave --zero_stage, --fsdp and --deepspeed out, or use one of whet's own --optim names, such as "
        "adamw_whet; an optimizer of your own says"
        f' {READS} = "element" (it reads the element that it updates, and its state) or "tensor" (that tensor)',
    )
