"""Products in 8-bit integers in plain torch: the reference of the native product."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from whet.kernels.random import hidden_bits

MOST = 127
_LEAST = 1e-30
_STREAM = 256
"""Elements per block of 64 random words: byte b of word w is for element 64 b + w."""


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
    rows = torch.arange(n_rows)
    words = hidden_bits(key, torch.zeros_like(rows), rows, 64 * n_streams).unflatten(1, (n_streams, 64))
    taken = torch.stack([words >> 8 * byte & 0xFF for byte in range(4)], dim=2)
    return (taken.flatten(1)[:, :width].double() + 0.5) / 256 - 0.5


def product(x: Tensor, weight: Tensor, bias: Tensor | None, block: int, key: tuple[int, int] | None = None) -> Tensor:
    """Return x (N, K) @ weight (M, K) transposed + bias in float64, both factors quantised along K."""
    rows, columns = quantise(x, block, key), quantise(weight, block)
    y = rows.numbers(x.shape[1]) @ columns.numbers(x.shape[1]).t()
    return y if bias is None else y + bias


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return (N, blocks, block), filled up with zeros."""
    block = min(block, x.shape[1])
    return pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
