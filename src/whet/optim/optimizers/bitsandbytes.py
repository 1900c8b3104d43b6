"""bitsandbytes' AdamW with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861)."""

from __future__ import annotations

from math import prod

from torch.optim import Optimizer

from whet.log import logger
from whet.optim.entry import Entry, Options, Request, Shapes
from whet.optional import extra, require

_BLOCK = 256
_MAP_BYTES = 4 * 256
_MIN_8BIT_SIZE = 4096


def build(request: Request) -> Optimizer:
    """Return bitsandbytes' AdamW; parameters with fewer than min_8bit_size elements keep 32-bit moments."""
    package = require("bitsandbytes", needed_for="--optim adamw_bnb_8bit", install=extra("bitsandbytes"))
    smallest = int(request.options.get("min_8bit_size", _MIN_8BIT_SIZE))
    logger.info("optim adamw_bnb_8bit: parameters with fewer than %d elements keep 32-bit moments", smallest)
    return package.optim.AdamW(request.groups, **request.adam, optim_bits=8, min_8bit_size=smallest)


def state_bytes(shapes: Shapes, options: Options, _itemsize: int) -> int:
    """Two codes per element, two scales per block, one pair of maps for all; small parameters: two fp32 moments."""
    smallest = int(options.get("min_8bit_size", _MIN_8BIT_SIZE))
    sizes = [prod(shape) for shape in shapes]
    large = [size for size in sizes if size >= smallest]
    small = sum(8 * size for size in sizes if size < smallest)
    return small + sum(2 * size + 8 * -(-size // _BLOCK) for size in large) + (2 * _MAP_BYTES if large else 0)


ENTRY = Entry(build=build, state_bytes=state_bytes)
