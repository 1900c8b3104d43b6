"""AdamW with 8-bit moments in plain torch: the dynamic map of Dettmers et al. 2022 (arXiv:2110.02861), in blocks.

A block of 256 elements shares one scale, its largest magnitude; the last block of a tensor is shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from whet.kernels.reference import layers as reference
from whet.kernels.specs import AdamWStep

BLOCK = 256
_DECADES = 7
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Codes:
    """A tensor in 8 bits: `codes` uint8 of its shape, `scales` (blocks,) fp32."""

    codes: Tensor
    scales: Tensor
    signed: bool

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the codes stand for, in the tensor's shape."""
        values = dynamic_map(self.signed).to(dtype)[self.codes.long()]
        scales = self.scales.to(dtype).repeat_interleave(BLOCK)[: self.codes.numel()]
        return values * scales.view(self.codes.shape)

    def put(self, numbers: Tensor) -> None:
        """Write the nearest codes of the numbers; without a sign, a positive number never becomes zero."""
        flat = numbers.flatten()
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(-1, keepdim=True)
        counts = largest >= _SMALLEST_SCALE
        shares = torch.where(counts, padded / largest.clamp_min(_SMALLEST_SCALE), 0.0)
        codes = (_nearest_signed if self.signed else _nearest_unsigned)(shares.double())
        self.codes.copy_(codes.flatten()[: flat.numel()].view(self.codes.shape))
        self.scales.copy_(torch.where(counts, largest, 0.0).flatten())


def zeros(shape: torch.Size, *, signed: bool) -> Codes:
    """Return the codes of a tensor of zeros."""
    blocks = -(-shape.numel() // BLOCK)
    return Codes(torch.zeros(shape, dtype=torch.uint8), torch.zeros(blocks), signed)


@cache
def dynamic_map(signed: bool) -> Tensor:
    """Return the value of each code (256,), float64.

    Seven decades below 1, each with twice the values of the one below, at the middles of equal parts of [0.1, 1] times
    the decade; and 0 and 1. Signed codes are a sign bit and a magnitude; minus zero, 0x80, stands for 1.
    """
    decades = []
    for i in range(_DECADES):
        places = 2**i if signed else 2 ** (i + 1)
        middles = (torch.arange(places, dtype=torch.float64) + 0.5) / places
        decades.append(10.0 ** (i - _DECADES + 1) * (0.1 + 0.9 * middles))
    positive = torch.cat(decades)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    return torch.cat([zero, positive, one, -positive] if signed else [zero, positive, one])


def adamw_8bit(
    state: Sequence[tuple[Tensor, Tensor, Codes, Codes]], rates: Sequence[tuple[float, float]], step: AdamWStep
) -> None:
    """Update (parameter, gradient, m, v) in place: `reference.adamw` on the decoded moments, which are then encoded."""
    for (param, grad, first, second), rate in zip(state, rates, strict=True):
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        m, v = first.numbers(wide), second.numbers(wide)
        reference.adamw([(param, grad, m, v)], [rate], step)
        first.put(m)
        second.put(v)


def _middles(values: Tensor) -> Tensor:
    return (values[1:] + values[:-1]) / 2


def _nearest_signed(shares: Tensor) -> Tensor:
    magnitudes = dynamic_map(True)[: 2 ** (_DECADES)]
    n = torch.bucketize(shares.abs(), _middles(magnitudes), right=True)
    codes = n | torch.where((shares < 0) & (n > 0), 0x80, 0)
    return torch.where(shares >= (magnitudes[-1] + 1) / 2, 0x80, codes)


def _nearest_unsigned(shares: Tensor) -> Tensor:
    codes = torch.bucketize(shares, _middles(dynamic_map(False)), right=True)
    return torch.where(shares > 0, codes.clamp_min(1), codes)
