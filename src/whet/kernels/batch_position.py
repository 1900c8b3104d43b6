"""Where in a run a forward pass stands: what dropout masks are keyed by and which rows attention may see."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
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
    `longest` () stay on the CPU: the tokens of the longest row, None where nobody has counted them. So does
    `key_counts` (rows,): the first so many tokens of a row are real, the others padding, to which nobody attends. None:
    all are real.
    """

    seed: int
    step: int
    slots: Tensor
    positions: Tensor
    row_starts: Tensor
    row_slots: Tensor
    longest: Tensor | None = field(default=None, kw_only=True)
    key_counts: Tensor | None = field(default=None, kw_only=True)

    def is_of(self, n_rows: int, n_tokens: int) -> bool:
        """Return whether a tensor of this size is of the pass, and not of a call that a hook makes meanwhile."""
        return torch.compiler.is_compiling() or (n_rows == 1 and n_tokens == len(self.slots))

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


@dataclass(frozen=True)
class DrawnPlace(Place):
    """A place whose seed comes from torch's CPU generator, when the pass makes its first mask.

    A pass without masks draws nothing, like torch's own dropout. `seed` and `step` mean nothing.
    """

    @cached_property
    def drawn(self) -> int:
        """The seed, drawn at the first use."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def key(self, site: int) -> tuple[int, int]:
        """Return the key words of the site's stream in this pass."""
        return stream_key(self.drawn, 0, site)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass that is running, and the one within which it was started."""

    placement: Placement
    place: Place | None
    uses: dict[int, int]
    """How often the pass has used each site so far."""
    outer: _Pass | None


_RUNNING: ContextVar[_Pass | None] = ContextVar("whet_running_pass", default=None)
"""The innermost pass of this thread. Passes of other threads, of one model too, do not see each other."""


def running() -> object | None:
    """Return what identifies the innermost pass of this thread; None outside of whet's passes."""
    return _RUNNING.get()


class Placement:
    """What all sites of one model share: their way to the running pass. It holds nothing of the pass itself."""

    def __init__(self, kernel: Kernel = "auto", *, outside: str = "sdpa") -> None:
        self.kernel: Kernel = kernel
        self.attention_outside = outside
        """The attention implementation of transformers that the model has outside of whet's passes."""
        self.traced: KeyedPlace | None = None
        """The place in a graph that is being traced: a tracer cannot read context variables."""

    @property
    def now(self) -> Place | None:
        """The place of the model's running pass in this thread; None outside of one."""
        if torch.compiler.is_compiling() and self.traced is not None:
            return self.traced
        own = self._own()
        return None if own is None else own.place

    def at(self, place: Place) -> Moment:
        """Return a context that is the forward pass of this micro-batch."""
        return Moment(self, place, {})

    def outside(self) -> Moment:
        """Return a context that is outside of any pass of this model, even if it is entered within one."""
        return Moment(self, None, {})

    def back(self) -> Moment:
        """Return a context that is this moment of the pass again: a recomputation meets the same places and masks."""
        own = self._own()
        return self.outside() if own is None else Moment(self, own.place, dict(own.uses))

    @property
    def is_lost(self) -> bool:
        """Whether a backward pass computes something again outside of the forward pass that it belonged to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._own() is not None:
            return False
        return torch._C._current_graph_task_id() != -1

    def site(self, number: int, n_sites: int) -> int:
        """Return the number of this use of a site: a layer that a model runs several times counts anew each time."""
        own = self._own()
        assert own is not None  # a site is used within a pass
        use = own.uses.get(number, 0)
        own.uses[number] = use + 1
        return number + n_sites * use

    def _own(self) -> _Pass | None:
        found = _RUNNING.get()
        while found is not None and found.placement is not self:
            found = found.outer
        return found


@dataclass(frozen=True)
class Moment:
    """A moment of a forward pass, as a context: to be entered any number of times, in any thread, nested too."""

    placement: Placement
    place: Place | None
    uses: dict[int, int]

    def __enter__(self) -> None:
        _RUNNING.set(_Pass(self.placement, self.place, dict(self.uses), _RUNNING.get()))

    def __exit__(self, *error: object) -> None:
        ended = _RUNNING.get()
        assert ended is not None
        _RUNNING.set(ended.outer)


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
        """The running forward pass in this thread; None outside of whet's own passes."""
        return self.placement.now

    def use(self) -> int:
        """Return the number of this use, for the mask's key."""
        if isinstance(self.place, KeyedPlace):
            return self.local
        return self.placement.site(self.number, self.n_sites)
