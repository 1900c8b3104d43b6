"""Linear layers whose weight is kept in 8 or 4 bits and is not trained: products of floating-point numbers with it.

In 8 bits each output channel has a scale: its largest magnitude divided by 127 (Dettmers et al., arXiv:2208.07339).
In 4 bits each 64 numbers have one, and codes are those of NormalFloat (Dettmers et al. 2023, arXiv:2305.14314). Both
passes multiply by the dequantised weight, a piece of the output channels at a time, so that a large weight never exists
in full. Activations are neither quantised nor kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from whet.kernels.matrix import input_gradient, product_of
from whet.kernels.operator import kept_table, once_differentiable

MOST = 127
"""The largest code."""
_LEAST = 1e-30
"""A row without a larger magnitude is all zeros: the inverse of its scale would not be finite."""
BLOCK = 64
"""Numbers that share a scale in 4 bits, along a row."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of 4-bit NormalFloat (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""


PIECE = 1 << 22
"""Numbers of a weight that are dequantised at a time: 16 MiB in float32."""


@dataclass(frozen=True)
class Codes8:
    """A weight (M, K) as whole numbers of 8 bits, and the scale of each of its rows."""

    codes: Tensor
    """(M, K) int8, from -127 to 127."""
    scales: Tensor
    """(M,) float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (M, K) of the weight."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return these rows of the weight (end - first, K), rounded once to dtype."""
        return (self.codes[first:end] * self.scales[first:end, None]).to(dtype)


@dataclass(frozen=True)
class Codes4:
    """A weight (M, K) as codes of 4 bits, two in a byte, and a scale for each 64 numbers of a row."""

    codes: Tensor
    """(M, blocks x 32) uint8: the code of a number, and of the one after it times 16; rows are filled up with zeros."""
    scales: Tensor
    """(M, blocks) float32: the largest magnitude of each block."""
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (M, K) of the weight."""
        return self.codes.shape[0], self.width

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return these rows of the weight (end - first, K), rounded once to dtype."""
        pairs = _pairs(self.codes.device).index_select(0, self.codes[first:end].flatten().int())
        scales = self.scales[first:end, :, None]
        found = pairs.view(*scales.shape[:2], BLOCK).mul_(scales).flatten(1)
        return found[:, : self.width].to(dtype)


Codes = Codes8 | Codes4


def rounded(weight: Tensor) -> Codes8:
    """Return a finite weight (M, K) rounded to the nearest code: no number moves by more than half its row's scale."""
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    there = largest >= _LEAST
    scales, inverse = (torch.where(there, one, torch.zeros_like(largest)) for one in (largest / MOST, MOST / largest))
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    step = _rows_in_a_piece(weight.shape[1])
    for first in range(0, len(wide), step):
        piece = slice(first, first + step)
        codes[piece] = (wide[piece] * inverse[piece, None]).round_().clamp_(-MOST, MOST)
    return Codes8(codes, scales)


def rounded_4(weight: Tensor) -> Codes4:
    """Return a finite weight (M, K) rounded to the nearest code of its block."""
    n_rows, width = weight.shape
    n_blocks = -(-width // BLOCK)
    codes = torch.empty(n_rows, n_blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n_rows, n_blocks, device=weight.device)
    numbers = torch.tensor(NF4, device=weight.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    step = _rows_in_a_piece(width)
    for first in range(0, n_rows, step):
        piece = weight[first : first + step].detach().float().contiguous()
        blocks = pad(piece, (0, n_blocks * BLOCK - width)).unflatten(1, (n_blocks, BLOCK))
        largest = blocks.abs().amax(-1)
        largest = torch.where(largest >= _LEAST, largest, torch.zeros_like(largest))
        inverse = torch.where(largest > 0, 1 / largest, largest)
        found = torch.bucketize(blocks * inverse[..., None], middles).flatten(1).to(torch.uint8)
        codes[first : first + step] = found[:, ::2] | found[:, 1::2] << 4
        scales[first : first + step] = largest
    return Codes4(codes, scales, width)


def linear(x: Tensor, weight: Codes, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) @ weight (M, K) transposed + bias (M,), in x's format or that of autocast.

    x and the bias get gradients, the weight none.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if bias is None:
        return _Linear.apply(x, weight, None)
    bias = bias.to(x.dtype)
    return _Linear.apply(x, weight, None) + bias if bias.requires_grad else _Linear.apply(x, weight, bias)


@kept_table
def _pairs(device: torch.device) -> Tensor:
    """Return the two numbers of each byte, (256, 2)."""
    bytes_ = torch.arange(256, device=device)
    return torch.tensor(NF4, device=device)[torch.stack([bytes_ % 16, bytes_ // 16], 1)]


def _pieces(weight: Codes, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in pieces of its rows, each with its place."""
    n_rows, width = weight.shape
    step = _rows_in_a_piece(width)
    for first in range(0, n_rows, step):
        end = min(first + step, n_rows)
        yield slice(first, end), weight.rows(first, end, dtype)


def _rows_in_a_piece(width: int) -> int:
    return max(1, PIECE // width)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.shape = weight, x.shape  # no tensor of the graph is kept
        rows = x.flatten(0, -2)
        if weight.shape[0] <= _rows_in_a_piece(weight.shape[1]):
            found = product_of(rows, weight.rows(0, weight.shape[0], x.dtype), bias)
        else:
            found = x.new_empty(len(rows), weight.shape[0])
            for place, piece in _pieces(weight, x.dtype):
                found[:, place] = product_of(rows, piece, None if bias is None else bias[place])
        return found.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        grad = grads[0].flatten(0, -2)
        total: Tensor | None = None
        for place, piece in _pieces(ctx.weight, grad.dtype):
            found = input_gradient(grad[:, place].contiguous(), piece)
            total = found.float() if total is None else total.add_(found)
        assert total is not None
        return total.to(grad.dtype).view(ctx.shape), None, None
