"""Random numbers that data sets and collators draw: a function of the position in the run.

A collator that masks tokens at random draws the same masks again after a resume. The generators that everybody shares
are seeded before each batch; so are generators that a collator keeps for itself, as transformers' does with a `seed`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.kernels.random import generators_kept, seed_torch, stream_key, within_64_bits

_SITE = 0x57EA
"""Makes the random numbers of the data differ from those of the dropout masks."""
_OWN_SITE = 0xD2A5
_DEEPEST = 3
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Draws:
    """The generators behind a run's batches."""

    def __init__(self, seed: int, *holders: Any) -> None:
        self.seed = seed
        found = [one for part in holders for one in _generators_of(part)]
        self.own = [(generator, _first_seed(holder, generator)) for holder, generator in found]
        """The own generators of the holders, such as a collator, each with the seed that it began with."""

    def begin(self, plan_step: int, first_slot: int) -> None:
        """Seed all generators for the batch of this step that begins with this row."""
        seed_everything(self.seed, plan_step, first_slot)
        for number, (generator, own_seed) in enumerate(self.own):
            low, high = stream_key(own_seed, within_64_bits(plan_step << 32 | first_slot), _OWN_SITE + number)
            _seed(generator, low | (high >> 1) << 32)

    @contextmanager
    def apart(self, number: int, rank: int = 0) -> Iterator[None]:
        """Seed all generators for a rank's batch with this number; give a source of rows its own states back."""
        with generators_kept():
            self.begin(number, rank)
            yield


def seed_everything(seed: int, epoch: int, number: int) -> None:
    """Seed the global random number generators from the position in the data."""
    low, high = key = stream_key(seed, within_64_bits(epoch << 32 | number), _SITE)
    seed_torch(key)
    random.seed(low | high << 32)
    np.random.seed(low)


def _generators_of(holder: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, generator) for each generator that a collator keeps, also in collators that it calls."""
    if getattr(holder, "seed", None) is not None and getattr(holder, "generator", 0) is None:
        make = getattr(holder, "create_rng", None)  # transformers' collators make it with the first batch
        if callable(make):
            make()
    inside = getattr(holder, "__dict__", {})
    for value in list(inside.values()):
        if isinstance(value, _KINDS):
            yield holder, value
        elif depth < _DEEPEST and callable(value) and not isinstance(value, type | nn.Module):
            yield from _generators_of(value, depth + 1)


def _first_seed(holder: Any, generator: Any) -> int:
    """Return the seed of a generator, 0 if nobody knows it any more."""
    own = getattr(holder, "seed", None)
    if isinstance(own, int):
        return own
    return generator.initial_seed() if isinstance(generator, torch.Generator) else 0


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)
