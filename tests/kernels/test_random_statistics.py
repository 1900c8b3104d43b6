"""The random bits of dropout masks are uniform and independent: statistics over millions of draws.

Keys are fixed, so the tests pass or fail once and for all. The bounds are five standard deviations: good random bits
would break one of the two thousand bounds below with a chance of 1 in 1000.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.kernels.random import attention_bits, hidden_bits, keep_threshold, stream_key

SEED, STEP, SITE = 11, 3, 8
SLOTS, POSITIONS, CHANNELS = 32, 256, 256


@cache
def grid(seed: int = SEED, step: int = STEP, site: int = SITE) -> Tensor:
    """Return the words of a batch as (SLOTS, POSITIONS, CHANNELS)."""
    slots = torch.arange(SLOTS).repeat_interleave(POSITIONS)
    positions = torch.arange(POSITIONS).repeat(SLOTS)
    return hidden_bits(stream_key(seed, step, site), slots, positions, CHANNELS).view(SLOTS, POSITIONS, CHANNELS)


@cache
def attention_grid(slot: int = 4) -> Tensor:
    """Return the words of one row's attention, as (8 heads, 512 queries, 512 keys)."""
    return attention_bits(stream_key(SEED, STEP, SITE), slot, 8, 512, 512, device=torch.device("cpu"))


def chi_square(cells: Tensor) -> float:
    """Return by how many standard deviations the cells' counts (256 of equal chance) are too uneven, or too even."""
    counts = cells.flatten().bincount(minlength=256).double()
    assert len(counts) == 256
    expected = counts.sum() / 256
    statistic = ((counts - expected).square() / expected).sum()
    return float((statistic - 255) / (2 * 255) ** 0.5)


def agreement(one: Tensor, other: Tensor) -> float:
    """Return, for the worst of the 32 bits, by how many standard deviations two words agree too often or too seldom."""
    differing = (one ^ other).flatten().numpy().astype(np.uint32)
    rates = np.unpackbits(differing.view(np.uint8).reshape(-1, 4), axis=1).mean(0)
    return float(np.abs(rates - 0.5).max() * 2 * len(differing) ** 0.5)


def correlation(one: Tensor, other: Tensor) -> float:
    """Return Pearson's correlation of the words as numbers, in standard deviations."""
    a, b = (words.flatten().double() / 2**32 - 0.5 for words in (one, other))
    return float((a * b).mean() * 12 * a.numel() ** 0.5)


def swapped(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words (n, n, ...) of all places (i, j) with i < j, and those of (j, i)."""
    i, j = torch.triu_indices(len(square), len(square), offset=1)
    return square[i, j], square[j, i]


places = pytest.mark.parametrize("words", [grid, attention_grid], ids=["hidden", "attention"])


@places
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_random_bytes_are_uniform(words: Callable[[], Tensor], shift: int) -> None:
    assert abs(chi_square(words() >> shift & 0xFF)) < 5


NEIGHBOURS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "steps": lambda: (grid(), grid(step=STEP + 1)),
    "sites": lambda: (grid(), grid(site=SITE + 1)),
    "seeds": lambda: (grid(), grid(seed=SEED + 1)),
    "step and site swapped": lambda: (grid(), grid(step=SITE, site=STEP)),
    "slots": lambda: (grid()[1:], grid()[:-1]),
    "positions": lambda: (grid()[:, 1:], grid()[:, :-1]),
    "slot and position swapped": lambda: swapped(grid()[:, :SLOTS]),
    "channels": lambda: (grid()[..., 1:], grid()[..., :-1]),
    "words of a counter": lambda: (grid()[..., 16:], grid()[..., :-16]),
    "blocks of channels": lambda: (grid()[..., 64:], grid()[..., :-64]),
    "heads": lambda: (attention_grid()[1:], attention_grid()[:-1]),
    "queries": lambda: (attention_grid()[:, 1:], attention_grid()[:, :-1]),
    "keys": lambda: (attention_grid()[..., 1:], attention_grid()[..., :-1]),
    "rows of attention": lambda: (attention_grid(), attention_grid(slot=5)),
    "query and key swapped": lambda: swapped(attention_grid().movedim(0, 2)),
    "hidden and attention": lambda: (grid()[4], attention_grid()[0, :POSITIONS, :CHANNELS]),
}
"""Places that differ in one thing."""


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_bits_are_independent(name: str) -> None:
    """No bit agrees too often, no number follows the other, and no pair of leading half bytes is too frequent."""
    one, other = NEIGHBOURS[name]()
    assert agreement(one, other) < 5
    assert abs(correlation(one, other)) < 5
    assert abs(chi_square((one >> 28 << 4) + (other >> 28))) < 5


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.999])
@places
def test_keep_rate_is_one_minus_p(words: Callable[[], Tensor], p: float) -> None:
    kept = words() >= keep_threshold(p)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation


def test_no_dropout_keeps_everything_and_full_dropout_nothing() -> None:
    assert keep_threshold(0.0) == 0
    assert keep_threshold(1.0) == 2**32 - 1  # a 32-bit word; what it keeps is multiplied by 0 (test_edge_values)
    assert bool((grid() >= 0).all())
    assert bool((grid() < 2**32).all())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["slots", "positions", "channels"])
def test_no_position_is_favoured(dim: int, p: float) -> None:
    """The kept shares of slots, of positions and of channels spread as those of independent draws do."""
    kept = (grid() >= keep_threshold(p)).double()
    shares = kept.mean([other for other in range(3) if other != dim])
    n_groups, n_draws = len(shares), kept.numel() // len(shares)
    deviations = (shares - (1 - p)) / (p * (1 - p) / n_draws) ** 0.5
    assert float(deviations.abs().max()) < 5
    assert abs(float(deviations.square().mean()) - 1) < 5 * (2 / n_groups) ** 0.5
