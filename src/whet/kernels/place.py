"""Where in a run a forward pass stands: what dropout masks are keyed by and which rows attention may see."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from whet.kernels.random import stream_key

Kernel = Literal["auto", "whet", "flash_attention_2"]
"""What attention on a GPU may run: the fastest that fits, only what keeps whet's dropout masks, only flash kernels."""


@dataclass(frozen=True)
class Place:
    """One micro-batch of rows, end to end, and its place in the run.

    `slots` and `positions` (N,) say for each token its row's place in the step's global batch and its own place in the
    row; `row_starts` (rows + 1,) where rows begin; `row_slots` (rows,) the rows' places. All int32. `row_slots` and
    `longest` () stay on the CPU: the tokens of the longest row, None where nobody has counted them.
    """

    seed: int
    step: int
    slots: Tensor
    positions: Tensor
    row_starts: Tensor
    row_slots: Tensor
    longest: Tensor | None = field(default=None, kw_only=True)

    def key(self, site: int) -> tuple[int, int]:
        """Return the key words of the site's stream in this step."""
        return stream_key(self.seed, self.step, site)


@dataclass(frozen=True)
class KeyedPlace(Place):
    """A place whose keys are a tensor (sites, 2) of int64 words: a compiled graph reads them anew at each step.

    Sites count from 0 within the compiled block, so that one graph serves every layer. `seed` and `step` mean nothing.
    """

    keys: Tensor

    def key(self, site: int) -> tuple[int, int]:
        """Return the site's key words; within a graph they are tensors (), which the plain operators take as well."""
        if torch.compiler.is_compiling():
            return self.keys[site, 0], self.keys[site, 1]  # pyright: ignore[reportReturnType]
        low, high = self.keys[site].tolist()
        return low, high


class Placement:
    """The place of the forward pass that is running now; one object shared by all sites of one model."""

    def __init__(self) -> None:
        self.now: Place | None = None
        self.kernel: Kernel = "auto"
        self._calls: dict[int, int] = {}

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Run the block as the forward pass of this micro-batch."""
        self.now, self._calls = place, {}
        try:
            yield
        finally:
            self.now = None

    def back(self) -> "Back":
        """Return a context that is this moment of the pass again: a recomputation meets the same places and masks."""
        return Back(self, self.now, dict(self._calls))

    def swap(self, now: Place | None, calls: dict[int, int]) -> tuple[Place | None, dict[int, int]]:
        """Be at this moment; return the one before."""
        before = self.now, self._calls
        self.now, self._calls = now, calls
        return before

    def site(self, number: int, n_sites: int) -> int:
        """Return the number of this use of a site: a layer that a model runs several times counts anew each time."""
        call = self._calls.get(number, 0)
        self._calls[number] = call + 1
        return number + n_sites * call


class Back:
    """A moment of a forward pass to go back to, any number of times."""

    def __init__(self, placement: Placement, now: Place | None, calls: dict[int, int]) -> None:
        self._placement, self._now, self._calls = placement, now, calls
        self._left: list[tuple[Place | None, dict[int, int]]] = []

    def __enter__(self) -> None:
        self._left.append(self._placement.swap(self._now, dict(self._calls)))

    def __exit__(self, *error: object) -> None:
        self._placement.swap(*self._left.pop())


@dataclass(frozen=True)
class Site:
    """One place in a model where random masks are used."""

    placement: Placement
    number: int
    n_sites: int
    local: int = 0
    """Its number within a compiled block."""

    @property
    def place(self) -> Place | None:
        """The running forward pass; None outside of whet's own passes."""
        return self.placement.now

    def use(self) -> int:
        """Return the number of this use, for the mask's key."""
        if isinstance(self.placement.now, KeyedPlace):
            return self.local
        return self.placement.site(self.number, self.n_sites)
