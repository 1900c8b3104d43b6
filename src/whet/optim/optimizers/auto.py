"""AdamW in the faster operator: whet's own on a CPU, torch's fused one elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from whet.kernels.library import library
from whet.optim.entry import WIDEST, Entry, Options, Request, Shapes, native_can_update
from whet.optim.optimizers import adamw_torch, native


def name_for(parameters: Iterable[Tensor]) -> str:
    """Return the optimizer's name that `auto` selects for these trainable parameters."""
    ours = library() is not None and all(map(native_can_update, parameters))
    return "adamw_whet" if ours else "adamw_torch_fused"


def build(request: Request) -> Optimizer:
    """Return whet's AdamW if its native operator can update every parameter, else torch's fused AdamW."""
    parameters = (parameter for group in request.groups for parameter in group["params"])
    entry = native.ENTRY if name_for(parameters) == "adamw_whet" else adamw_torch.FUSED
    return entry.build(request)


def state_bytes(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The bytes of the selected one, for parameters on the CPU."""
    ours = library() is not None and itemsize <= WIDEST
    return (native if ours else adamw_torch).state_bytes(shapes, options, itemsize)


ENTRY = Entry(build=build, state_bytes=state_bytes)
