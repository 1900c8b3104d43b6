"""AdamW, by whichever operator is the faster here: whet's own on a CPU, torch's fused one elsewhere."""

from __future__ import annotations

from torch.optim import Optimizer

from whet.kernels.library import library
from whet.optim import adamw_torch, native
from whet.optim.recipe import Recipe, Request


def build(request: Request) -> Optimizer:
    """Return whet's AdamW where its native operator can update every parameter, else torch's fused AdamW."""
    parameters = [parameter for group in request.groups for parameter in group["params"]]
    ours = library() is not None and all(p.device.type == "cpu" and p.dtype.itemsize <= 4 for p in parameters)
    return (native.RECIPE if ours else adamw_torch.FUSED).build(request)


RECIPE = Recipe(build=build, state_bytes=native.state_bytes)
