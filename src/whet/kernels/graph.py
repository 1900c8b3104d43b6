"""Operators inside a compiled graph: they run as the custom operators that `torch_ops/` registers with torch."""

import torch
from torch import Tensor

from whet.kernels.batch_position import KeyedPosition
from whet.kernels.specs import Drop

_DTYPES = (torch.float32, torch.bfloat16)
Mask = tuple[float, int, Tensor | None, Tensor | None, Tensor | None]
"""Probability, site, keys, slots and positions: a dropout as arguments of an operator."""
_NOTHING: Mask = (0.0, 0, None, None, None)


class Traced:
    """What graphs under tracing may contain; `methods/compile_blocks.py` sets it."""

    operators = False
    """Whether `torch_ops/` has registered its operators. Graphs compiled by others contain plain torch."""
    native = False
    """Whether the native library can run them."""


def holds(*tensors: Tensor | None, drop: Drop | None = None) -> bool:
    """Return whether a graph is being traced and can contain the native operator for these tensors."""
    if not (in_graph(drop) and Traced.native):
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.device.type == "cpu" and t.dtype in _DTYPES and t.dtype == given[0].dtype for t in given)


def in_graph(drop: Drop | None) -> bool:
    """Return whether a block is being traced, and operators can read the dropout's position."""
    if not (torch.compiler.is_compiling() and Traced.operators):
        return False
    return drop is None or drop.p == 0.0 or isinstance(drop.position, KeyedPosition)


def mask_arguments(drop: Drop | None) -> Mask:
    """Return a dropout as arguments of an operator."""
    if drop is None or drop.p == 0.0:
        return _NOTHING
    assert isinstance(drop.position, KeyedPosition)
    return drop.p, drop.site, drop.position.keys, drop.position.slots, drop.position.positions
