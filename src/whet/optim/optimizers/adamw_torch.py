"""AdamW (Loshchilov and Hutter 2019, algorithm 2) of torch, and of apex if it is installed."""

from __future__ import annotations

import importlib.util
from math import prod

import torch
from torch.optim import Optimizer

from whet.errors import ConfigError
from whet.log import logger
from whet.optim.entry import STEP_BYTES, Entry, Options, Request, Shapes
from whet.optional import require


def build(request: Request) -> Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(request.groups, **request.adam, fused=False)


def build_fused(request: Request) -> Optimizer:
    """Return torch's AdamW that updates all weights in one pass over memory; on a CPU only if all are contiguous.

    Its operator for CPUs takes the memory of a parameter as contiguous, and writes past the elements of other views.
    """
    parameters = [one for group in request.groups for one in group["params"]]
    fused = all(one.is_contiguous() for one in parameters if one.device.type == "cpu")
    if not fused:
        logger.info("optim adamw_torch_fused: some weights are not contiguous; adamw_torch updates them, which computes"
                    " the same")  # fmt: skip
    return torch.optim.AdamW(request.groups, **request.adam, fused=fused)


def build_hf(request: Request) -> Optimizer:
    """Return torch's AdamW for the name of transformers' own, which was removed."""
    logger.info("optim adamw_hf: transformers' own AdamW was removed; adamw_torch computes the same")
    return build(request)


def build_apex(request: Request) -> Optimizer:
    """Return apex's fused AdamW."""
    if importlib.util.find_spec("apex") is None:
        raise ConfigError(
            what="the package 'apex' is missing",
            got="adamw_apex_fused",
            why="--optim adamw_apex_fused is apex's FusedAdam, which needs a GPU and a separate build",
            fix="use --optim adamw_torch_fused, which computes the same in one pass too",
        )
    package = require("apex.optimizers", needed_for="--optim adamw_apex_fused", install="apex")
    return package.FusedAdam(request.groups, **request.adam, adam_w_mode=True)


def state_bytes(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """Two moments as wide as the parameter, and the step."""
    return sum(2 * itemsize * prod(shape) + STEP_BYTES for shape in shapes)


def state_bytes_apex(shapes: Shapes, _options: Options, _itemsize: int) -> int:
    """Two moments in fp32; the group counts the steps."""
    return sum(8 * prod(shape) for shape in shapes)


PLAIN = Entry(build=build, state_bytes=state_bytes)
FUSED = Entry(build=build_fused, state_bytes=state_bytes)
HF = Entry(build=build_hf, state_bytes=state_bytes)
APEX = Entry(build=build_apex, state_bytes=state_bytes_apex)
