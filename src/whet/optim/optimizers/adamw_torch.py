"""AdamW of torch (Loshchilov and Hutter 2019, algorithm 2)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from whet.log import logger
from whet.optim.entry import Entry, Request


def build(request: Request) -> Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(request.groups, **request.adam, fused=False)


def build_fused(request: Request) -> Optimizer:
    """Return torch's AdamW that updates all weights in one pass over memory; on a CPU only if all are contiguous.

    Its operator for CPUs takes the memory of a parameter as contiguous, and writes past the elements of other views.
    """
    fused = all(one.is_contiguous() for one in request.parameters if one.device.type == "cpu")
    if not fused:
        logger.info("optim adamw_torch_fused: some weights are not contiguous; adamw_torch updates them, which computes"
                    " the same")  # fmt: skip
    return torch.optim.AdamW(request.groups, **request.adam, fused=fused)


OPTIMIZERS = (
    Entry(
        name="adamw_torch",
        rule="AdamW",
        does="AdamW of torch",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
        aliases={"adamw_hf": "transformers' own AdamW was removed; adamw_torch computes the same"},
        betas=True,
        epsilon=True,
        reads="element",
        moments=2,
        scalars=1,
        claim="the usual one: 8 bytes per parameter (24 GB for 3 billion)",
        kind=torch.optim.AdamW,
        build=build,
    ),
    Entry(
        name="adamw_torch_fused",
        rule="AdamW",
        does="AdamW of torch in one pass over memory",
        source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
        betas=True,
        epsilon=True,
        reads="element",
        moments=2,
        scalars=1,
        claim="faster than adamw_torch",
        kind=torch.optim.AdamW,
        build=build_fused,
    ),
)
