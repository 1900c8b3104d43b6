"""The position of a micro-batch in a run: it keys dropout masks and says which tokens attend to which."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.kernels.random import stream_key

T = TypeVar("T")
Kernel = Literal["auto", "whet", "flash_attention_2"]
"""Kernels for attention on a GPU: the fastest, only those with whet's dropout masks, only flash kernels."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tokens of a pass whose last hidden states somebody reads; the last block computes no others.

    `tokens` (M,) int64 are their indices in the packed batch, in rising order; `slots` and `positions` (M,) int32 are
    theirs as in `BatchPosition`. M is below N, so the size of a tensor says which tokens it holds.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    begins_at: object
    """The attention module from which on hidden states are those of these tokens alone."""


@dataclass(frozen=True)
class BatchPosition:
    """A micro-batch of sequences, packed end to end, and its position in the run. All tensors are int32.

    For each token, `slots` (N,) is the index of its row in the step's global batch and `positions` (N,) its index in
    that row. Row r has the tokens cu_seqlens[r] to cu_seqlens[r + 1], and `row_slots` (rows,) is each row's slot.
    `max_seqlen` () is the length of the longest row; None: not counted. The first key_counts[r] tokens of row r are
    real and the others padding, to which no token attends; None: all are real. `sizes` (N,), in floating point, is how
    many tokens of the padded batch each token stands for; None: there is no padding. `row_slots`, `max_seqlen` and
    `key_counts` stay on the CPU. `chosen`: the tokens that the last block computes; None: all.
    """

    seed: int
    step: int
    slots: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    row_slots: Tensor
    max_seqlen: Tensor | None = field(default=None, kw_only=True)
    key_counts: Tensor | None = field(default=None, kw_only=True)
    sizes: Tensor | None = field(default=None, kw_only=True)
    chosen: Chosen | None = field(default=None, kw_only=True)

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        return int(self.cu_seqlens.diff().max() if self.max_seqlen is None else self.max_seqlen)

    def is_of(self, n_rows: int, n_tokens: int) -> bool:
        """Return whether a tensor of this size belongs to the pass, and not to a call that a hook makes during it."""
        return torch.compiler.is_compiling() or (n_rows == 1 and self.has(n_tokens))

    def has(self, n_tokens: int) -> bool:
        """Return whether so many hidden states are those of all tokens, or of the chosen ones."""
        return n_tokens == len(self.slots) or (self.chosen is not None and n_tokens == len(self.chosen.tokens))

    def places(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return slots and positions of the tokens that so many hidden states belong to."""
        if self.chosen is not None and n_tokens == len(self.chosen.tokens):
            return self.chosen.slots, self.chosen.positions
        return self.slots, self.positions

    def key(self, site: int) -> tuple[int, int]:
        """Return the key words of the site's stream in this step."""
        return stream_key(self.seed, self.step, site)

    def of_all_tokens(self) -> BatchPosition:
        """Return the position of a pass over all tokens, with the masks of this one."""
        return replace(self, chosen=None)

    def of_table(self, first: int, n: int) -> BatchPosition:
        """Return a position for the n rows of a table from `first` on, with the keys of this one.

        The mask of a row of the table depends on its number alone: all micro-batches of a step have the same.
        """
        rows = torch.arange(first, first + n, dtype=torch.int32, device=self.slots.device)
        return BatchPosition(self.seed, self.step, torch.zeros_like(rows), rows, self.cu_seqlens, self.row_slots)


@dataclass(frozen=True)
class KeyedPosition(BatchPosition):
    """A position whose keys are a tensor (sites, 2) of int64 words, which a compiled graph reads at each step.

    Sites count from 0 within the compiled block, so that one graph serves every layer. `seed` and `step` are not used.
    `keys` stay on the CPU, for operators; `words` are the same on the device, for what the graph itself computes. None:
    that is the CPU.
    """

    keys: Tensor
    words: Tensor | None = None

    def key(self, site: int) -> tuple[int, int]:
        """Return the site's key words; within a graph they are tensors (), which the plain operators accept too."""
        if torch.compiler.is_compiling():
            words = self.keys if self.words is None else self.words
            return words[site, 0], words[site, 1]  # pyright: ignore[reportReturnType]
        low, high = self.keys[site].tolist()
        return low, high

    def of_table(self, first: int, n: int) -> BatchPosition:
        """Return a position for the n rows of a table from `first` on, with the keys of this one."""
        of_rows = super().of_table(first, n)
        return replace(self, slots=of_rows.slots, positions=of_rows.positions)


@dataclass(frozen=True)
class StaticPosition(BatchPosition):
    """A position of a rounded size, whose tensors may be the inputs of a CUDA graph: all of them are on the GPU.

    `source` is the position of the batch that it stands for; None: that of a graph, which changes between replays.
    Then `keys` (sites, 2) int64 are the key words of the sites in `sites`, which gets each site that the graph uses.
    `draws` is not empty once a kernel has drawn from the device's generator. `seed` and `step` are not used.
    """

    source: BatchPosition | None
    keys: Tensor
    sites: dict[int, int]
    draws: set[str]

    def key(self, site: int) -> tuple[int, int]:
        """Return the site's key words; those of a graph are tensors ()."""
        if self.source is not None:
            return self.source.key(site)
        place = self.sites.setdefault(site, len(self.sites))
        return self.keys[place, 0], self.keys[place, 1]  # pyright: ignore[reportReturnType]

    def of_table(self, first: int, n: int) -> BatchPosition:
        """Return a position for the n rows of a table from `first` on, with the keys of this one."""
        of_rows = super().of_table(first, n)
        return replace(self, slots=of_rows.slots, positions=of_rows.positions)


@dataclass(frozen=True)
class DrawnPosition(BatchPosition):
    """A position whose seed comes from torch's CPU generator when the pass makes its first mask.

    A pass without masks draws nothing, like torch's own dropout. `seed` and `step` are not used.
    """

    @cached_property
    def drawn(self) -> int:
        """The seed, drawn at the first use."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def key(self, site: int) -> tuple[int, int]:
        """Return the key words of the site's stream in this pass."""
        return stream_key(self.drawn, 0, site)

    def of_all_tokens(self) -> BatchPosition:
        """Return the position of a pass over all tokens, with the masks of this one."""
        found = super().of_all_tokens()
        if "drawn" in self.__dict__:
            found.__dict__["drawn"] = self.drawn
        return found

    def of_table(self, first: int, n: int) -> BatchPosition:
        """Return a position for the n rows of a table from `first` on, with the seed that this pass draws."""
        return replace(super().of_table(first, n), seed=self.drawn, step=0)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A running forward pass, and the pass within which it started."""

    placement: Placement
    position: BatchPosition | None
    uses: dict[int, int]
    """How often the pass has used each site so far."""
    outer: _Pass | None
    kept: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    """What layers share that is computed from a tensor of the pass, by its id."""


_RUNNING: ContextVar[_Pass | None] = ContextVar("whet_running_pass", default=None)
"""The innermost pass of this thread. Passes of other threads, of one model too, do not see each other."""


def running() -> object | None:
    """Return what identifies the innermost pass of this thread; None outside of whet's passes."""
    return _RUNNING.get()


def running_position() -> BatchPosition | None:
    """Return the position of the innermost pass of this thread; None outside of whet's passes."""
    found = _RUNNING.get()
    return None if found is None else found.position


def kept_in_pass(of: Tensor, make: Callable[[], T]) -> T:
    """Return what `make` computes from a tensor: in a pass once, for all layers that ask with the same tensor."""
    own = _RUNNING.get()
    if own is None:
        return make()
    if id(of) not in own.kept:
        own.kept[id(of)] = (of, make())
    return own.kept[id(of)][1]


class Placement:
    """The link from all sites of one model to its running pass. It holds no state of the pass.

    Copies share it: a block that is copied within a model runs in the model's passes. A copied model has passes of its
    own even so, since what is innermost counts.
    """

    def __init__(self, kernel: Kernel = "auto", *, causal: bool = False) -> None:
        self.kernel: Kernel = kernel
        self.causal = causal
        """Whether the model's attention is causal."""
        self.traced: KeyedPosition | None = None
        """The position in a graph that is being traced: a tracer cannot read context variables."""

    def __deepcopy__(self, memo: object) -> Placement:
        return self

    @property
    def now(self) -> BatchPosition | None:
        """The position of the model's running pass in this thread; None outside of a pass."""
        if torch.compiler.is_compiling() and self.traced is not None:
            return self.traced
        own = self._own()
        return None if own is None else own.position

    def at(self, position: BatchPosition) -> Moment:
        """Return a context that is the forward pass of this micro-batch."""
        return Moment(self, position, {})

    def outside(self) -> Moment:
        """Return a context that is outside of any pass of this model, even if it is entered within one."""
        return Moment(self, None, {})

    def back(self) -> Moment:
        """Return a context that re-enters the pass at this moment: a recomputation sees the same position and masks."""
        own = self._own()
        return self.outside() if own is None else Moment(self, own.position, dict(own.uses))

    @property
    def is_lost(self) -> bool:
        """Whether a backward pass computes something again outside of the forward pass that it belonged to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._own() is not None:
            return False
        return torch._C._current_graph_task_id() != -1

    def site(self, number: int, n_sites: int) -> int:
        """Return the number of this use of a site: each run of a layer that a model runs several times has its own."""
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
    """A moment of a forward pass, as a context that any thread may enter any number of times, nested too."""

    placement: Placement
    position: BatchPosition | None
    uses: dict[int, int]

    def __enter__(self) -> None:
        _RUNNING.set(_Pass(self.placement, self.position, dict(self.uses), _RUNNING.get()))

    def __exit__(self, *error: object) -> None:
        ended = _RUNNING.get()
        assert ended is not None
        _RUNNING.set(ended.outer)


@dataclass(frozen=True)
class Site:
    """A dropout or an attention of a model: where it uses random masks."""

    placement: Placement
    number: int
    n_sites: int
    local: int = 0
    """Its number within a compiled block."""

    def use(self, position: BatchPosition) -> int:
        """Return the number of this use in the running pass, whose position this is, for the mask's key."""
        if isinstance(position, KeyedPosition):
            return self.local
        return self.placement.site(self.number, self.n_sites)


@dataclass(frozen=True)
class Drop:
    """Dropout with probability p at one site of a model; `at` makes it."""

    p: float
    position: BatchPosition
    site: int
    masks: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What native operators read of it, by the number of tokens: a backward pass takes that of its forward pass."""

    @classmethod
    def at(cls, site: Site, p: float, position: BatchPosition) -> Drop | None:
        """Return the dropout of this use of the site; None if p is 0.

        Raises ConfigError unless 0 <= p <= 1, as torch's own dropout does: the operators compute with any number.
        """
        if not 0.0 <= p <= 1.0:
            raise ConfigError(
                what="a dropout of the model is not a probability",
                got=p,
                why="it is the share of numbers that are set to zero",
                fix="use 0 to 1: config.json has one for each kind, such as attention_dropout or hidden_dropout_prob",
            )
        return cls(p, position, site.use(position)) if p else None

    @property
    def key(self) -> tuple[int, int]:
        """The key words of this site's stream in this step."""
        return self.position.key(self.site)

    @property
    def keep_scale(self) -> float:
        """The factor of kept values. With p = 1 every value becomes zero, as in torch."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
