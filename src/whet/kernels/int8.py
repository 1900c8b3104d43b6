"""Linear layers whose products run in 8-bit integers; the gradient of the weight stays in fp32.

Each block of a row of x, and of the weight along the same dimension, has its own scale; products and sums within a
block are exact. The weight is packed once per step and serves all micro-batches (SwitchBack: Wortsman et al. 2023,
arXiv:2304.13013; blocks: Xi et al. 2024, arXiv:2403.12422).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from whet.kernels.library import library
from whet.kernels.matrix import input_gradient, weight_gradient
from whet.kernels.operator import call, floats, misfit, once_differentiable
from whet.kernels.random import hidden_bits, stream_key

BLOCK = 256
"""Elements that share a scale. Smaller blocks round more finely and cost one more multiplication per block."""
PANEL = 32
"""Columns side by side in a packed weight (kPanel in native/products/int8_product.cpp)."""
_FIRST_SITE = 1 << 40
"""Sites of dropout have smaller numbers, so no rounding shares a key with a mask."""
MOST = 127
"""The largest integer."""
_LEAST = 1e-30
_STREAM = 256
"""Elements per block of 64 random words: byte b of word w is for element 64 b + w."""


@cache
def has_vnni() -> bool:
    """Return whether this processor has the instructions for a fast product, and the library uses them."""
    found = ctypes.c_int32(0)
    if library() is not None:
        call("int8_support", vnni=ctypes.addressof(found))
    return bool(found.value)


@dataclass(frozen=True)
class Packed:
    """A weight (columns, depth), or (depth, columns), as bytes in the order of the product's reads."""

    depth: int
    columns: int
    block: int
    data: Tensor
    scales: Tensor


def pack(weight: Tensor, *, down: bool, block: int = BLOCK) -> Packed:
    """Return a contiguous fp32 weight packed: (columns, depth) or, `down`, (depth, columns)."""
    depth, columns = weight.shape if down else reversed(weight.shape)
    panels, groups, blocks = -(-columns // PANEL), -(-depth // 4), -(-depth // block)
    data = weight.new_empty(panels, groups, PANEL, 4, dtype=torch.uint8)
    scales = floats(blocks, panels * PANEL)
    shape = {"depth": depth, "columns": columns, "block": block, "down": down}
    call("int8_pack", **shape, weight=weight, packed=data, scales=scales)
    return Packed(depth, columns, block, data, scales)


def packed_bytes(columns: int, depth: int, block: int = BLOCK) -> int:
    """Return the bytes of a packed weight."""
    padded_columns = -(-columns // PANEL) * PANEL
    return padded_columns * (-(-depth // 4) * 4 + -(-depth // block) * torch.float32.itemsize)


def product(x: Tensor, weight: Packed, bias: Tensor | None = None, key: tuple[int, int] | None = None) -> Tensor:
    """Return x (N, depth) times the packed weight + bias, (N, columns) in fp32.

    With a key, x is rounded stochastically: exact on average.
    """
    fits = x.shape[1:] == (weight.depth,) and x.is_contiguous() and (bias is None or bias.numel() == weight.columns)
    if not fits:
        raise misfit("int8_product", x, bias)
    y = floats(len(x), weight.columns)
    shape = {"rows": len(x), "depth": weight.depth, "columns": weight.columns, "block": weight.block}
    rounding = {"stochastic": key is not None, "key": 0 if key is None else key[0] | key[1] << 32}
    call("int8_product", **shape, **rounding, x=x, packed=weight.data, scales=weight.scales, bias=bias, y=y)
    return y


class Step:
    """The packed weights of one optimizer step, and the randomness of its rounding."""

    def __init__(self, seed: int, step: int, *, backward: bool = True) -> None:
        self.backward = backward
        """Whether the gradient of the input is computed in 8 bits as well."""
        self._seed, self._step, self._n_roundings = seed, step, 0
        self._packed: dict[tuple[Any, ...], tuple[Sequence[Tensor], Packed]] = {}

    def packed(self, weight: Tensor, parts: Sequence[Tensor], *, down: bool) -> Packed:
        """Return the packed weight, a concatenation of these parameters' rows; packed at its first use."""
        name = (down, *(part.data_ptr() for part in parts))
        if name not in self._packed:
            self._packed[name] = (
                parts,
                pack(weight.detach().contiguous(), down=down),
            )  # kept alive: addresses stay unique
        return self._packed[name][1]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        """Return x (..., K) @ weight (M, K) transposed + bias (M,), within the error of 8 bits. Keeps x."""
        return _Linear.apply(x, weight, bias, self, parts)

    def next_key(self) -> tuple[int, int]:
        """Return the key of this step's next rounding; the order of backward passes is fixed."""
        self._n_roundings += 1
        return stream_key(self._seed, self._step, _FIRST_SITE + self._n_roundings)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: Step, parts: Sequence[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.step, ctx.parts = bias is not None, step, tuple(parts)
        rows = x.flatten(0, -2).contiguous()
        packed = step.packed(weight, parts, down=False)
        return product(rows, packed, None if bias is None else bias.contiguous()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2).contiguous()
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx = _input_gradient(ctx, grad, weight).view(x.shape) if need_x else None
        if not need_weight:
            return dx, None, grad.sum(0) if ctx.has_bias else None, None, None
        return dx, *weight_gradient(grad, rows, bias=ctx.has_bias), None, None


def _input_gradient(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    step: Step = ctx.step
    if not step.backward:
        return input_gradient(grad, weight)
    return product(grad, step.packed(weight, ctx.parts, down=True), key=step.next_key())


@dataclass(frozen=True)
class Quantised:
    """Rows (N, K) as integers in blocks, (N, blocks, block), and the scale of each block (N, blocks)."""

    whole: Tensor
    scales: Tensor

    def numbers(self, width: int) -> Tensor:
        """Return the values (N, width) that they represent, in float64."""
        return (self.whole.double() * self.scales.double()[..., None]).flatten(1)[:, :width]


def quantise(x: Tensor, block: int, key: tuple[int, int] | None = None) -> Quantised:
    """Return x (N, K) rounded to nearest; with a key, rounded stochastically."""
    added = torch.zeros_like(x) if key is None else dither(key, *x.shape).to(x.dtype)
    cut = _blocks(x, block)
    largest = cut.abs().amax(-1)
    there = largest >= _LEAST
    inverse = torch.where(there, MOST / largest, torch.zeros_like(largest))
    whole = (cut * inverse[..., None] + _blocks(added, block)).round()
    return Quantised(whole, torch.where(there, largest / MOST, torch.zeros_like(largest)))


def dither(key: tuple[int, int], n_rows: int, width: int) -> Tensor:
    """Return numbers of (-1/2, 1/2) in 256 steps, evenly spread, (n_rows, width) float64."""
    n_streams = -(-width // _STREAM)
    rows = torch.arange(n_rows, device="cpu")
    words = hidden_bits(key, torch.zeros_like(rows), rows, 64 * n_streams).unflatten(1, (n_streams, 64))
    taken = torch.stack([words >> 8 * byte & 0xFF for byte in range(4)], dim=2)
    return (taken.flatten(1)[:, :width].double() + 0.5) / 256 - 0.5


def product_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, block: int, key: tuple[int, int] | None = None
) -> Tensor:
    """Return x (N, K) @ weight (M, K) transposed + bias in float64, both factors quantised along K."""
    rows, columns = quantise(x, block, key), quantise(weight, block)
    y = rows.numbers(x.shape[1]) @ columns.numbers(x.shape[1]).t()
    return y if bias is None else y + bias


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return (N, blocks, block), filled up with zeros."""
    block = min(block, x.shape[1])
    return pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
