"""Dropout of hidden states, with a mask that is a function of the position: no mask is stored."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from whet.kernels import graph
from whet.kernels.batch_position import BatchPosition, Drop, KeyedPosition, StaticPosition
from whet.kernels.library import library
from whet.kernels.operator import DTYPES, call, misfit, native_for, once_differentiable, rounded, rows_of, wide
from whet.kernels.random import hidden_bits, keep_threshold, stream_key

GraphMask = tuple[float, int, Tensor | None, Tensor | None, Tensor | None]
"""Probability, site, keys, slots and positions: a dropout as arguments of an operator in a graph."""


def dropout(x: Tensor, drop: Drop) -> Tensor:
    """Return x (..., D) with channels dropped and the kept ones scaled by 1 / (1 - p)."""
    if graph.holds(x, drop=drop):
        return torch.ops.whet.dropout(x, *mask_arguments(drop))
    if native_for(x) is None:
        return dropout_reference(x, drop)
    return _Dropout.apply(x, drop)


def dropout_reference(x: Tensor, drop: Drop) -> Tensor:
    """Return `dropout` in plain torch, also in float64."""
    return dropped(wide(x), drop).to(x.dtype)


def dropped(x: Tensor, drop: Drop) -> Tensor:
    """Return x (..., D), of the format to compute in, with channels dropped, in plain torch."""
    bits = hidden_bits(drop.key, *drop.position.places(prod(x.shape[:-1])), x.shape[-1])
    return x * (bits >= keep_threshold(drop.p)).view(x.shape) * rounded(drop.keep_scale)


def dropout_forward(x: Tensor, drop: Drop) -> Tensor:
    """Return x with channels dropped. The gradient of x is the same function of the gradient of the result."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, width = rows_of(x)
    call("dropout", rows=rows, width=width, dtype=DTYPES[x.dtype], mask=mask_of(drop, rows), x=x, y=y)
    return y


def device_dropout(x: Tensor, drop: Drop) -> Tensor:
    """Return x with elements dropped by torch's own kernel for the device, which draws its mask in one pass.

    Its masks are those of `drawing_from`: another split into micro-batches has others.
    """
    with drawing_from(drop, x.device):
        return functional.dropout(x, drop.p)


def drawing_from(drop: Drop | None, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of a kernel that draws a mask from the device's generator.

    The generator is set for this call from (seed, step, site, first row) and restored afterwards: a recomputation or a
    resumed run gets the same mask. A pass of a rounded size is seeded once, whether a graph replays it or not.
    """
    if drop is None:
        return nullcontext()
    if isinstance(drop.position, StaticPosition):  # one seed for the pass, as a graph has it
        source, draws = drop.position.source, drop.position.draws
        if source is not None and not draws:
            generator_of(device).manual_seed(pass_seed(source))
        draws.add("device")
        return nullcontext()
    return seeded(generator_of(device), call_seed(drop))


def pass_seed(position: BatchPosition) -> int:
    """Return the generator's seed of a complete pass: one for each (seed, step) and first row of the micro-batch."""
    low, high = position.key(int(position.row_slots[0]))
    return low | (high >> 1) << 32


def call_seed(drop: Drop) -> int:
    """Return the generator's seed of this call: one for each (seed, step, site) and first row of the micro-batch."""
    low, high = drop.key
    low, high = stream_key(low | high << 32, int(drop.position.row_slots[0]), 0)
    return low | (high >> 1) << 32


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that kernels on this device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def seeded(generator: torch.Generator, seed: int) -> Iterator[None]:
    """Run the block with the generator seeded; restore its state afterwards."""
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: Drop) -> Tensor:
        ctx.drop = drop
        return dropout_forward(x, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return dropout_forward(grads[0], ctx.drop), None


def mask_of(drop: Drop | None, n_rows: int) -> bytes | None:
    """Return the dropout mask of a hidden state of n_rows tokens as an argument; None without dropout."""
    if drop is None or drop.p == 0.0:
        return None
    if (known := drop.masks.get(n_rows)) is not None:
        return known
    slots, positions = drop.position.places(n_rows)
    assert slots.dtype == positions.dtype == torch.int32
    if not slots.numel() == positions.numel() == n_rows:
        raise misfit(f"dropout of {n_rows} tokens", slots, positions)
    low, high = drop.key
    found = library()
    assert found is not None
    key, threshold = low | high << 32, keep_threshold(drop.p)
    mask = {"key": key, "threshold": threshold, "scale": drop.keep_scale, "slot": slots, "position": positions}
    drop.masks[n_rows] = packed = found.pack("Mask")(mask)
    return packed


def mask_arguments(drop: Drop | None) -> GraphMask:
    """Return a dropout as arguments of an operator in a graph."""
    if drop is None or drop.p == 0.0:
        return 0.0, 0, None, None, None
    assert isinstance(drop.position, KeyedPosition)
    return drop.p, drop.site, drop.position.keys, drop.position.slots, drop.position.positions


def drop_of(p: float, site: int, keys: Tensor | None, slots: Tensor | None, positions: Tensor | None) -> Drop | None:
    """Return the dropout that `mask_arguments` turned into these arguments."""
    if keys is None or slots is None or positions is None:
        return None
    return Drop(p, KeyedPosition(0, 0, slots, positions, slots, slots, keys), site)


def _in_graph(x: Tensor, p: float, site: int, keys: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    drop = drop_of(p, site, keys, slots, positions)
    assert drop is not None
    return dropout_forward(x, drop)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.p, ctx.site, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor) -> Any:
    return torch.ops.whet.dropout(dy, ctx.p, ctx.site, *ctx.saved_tensors), None, None, None, None, None


graph.operator("dropout", _in_graph, lambda x, *mask: x.new_empty(x.shape), save=_save, gradient=_gradient)
