"""The memory of one rank at its peak, by part: a rehearsed step, the optimizer's state, and what is held already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which imports torch
    from whet.plan.rehearsal import Trace

PARTS: Mapping[str, str] = {
    "program": "Python, its libraries, the tokenizer",
    "data": "training and evaluation rows",
    "weights": "weights",
    "average": "mean of the weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations, kept for backward",
    "logits": "logits and their gradient",
    "workspace": "working memory of a pass",
    "allocator": "gaps that the allocator leaves",
    "saving": "copies for a save, or the weights of other ranks",
}
"""Name of a part in plan.json -> the words for it, in the order in which they are shown."""
_LOGITS = 2
"""Dimensions of a table of logits; its last one is the vocabulary."""
TIGHT_FRAC = 0.9
"""Above this share of what is free, a run fits only if nothing else on the machine grows."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What one rank will hold when it holds the most."""

    parts: Mapping[str, int]
    """Bytes by the names of `PARTS`; a part that is not there is left out."""
    moment: str
    """When that is: in a training step, an update of the weights, an evaluation, or when ranks complete the model."""
    free_bytes: int | None
    """What this process may use, with what it holds already; None: the system does not say."""
    micro_batch_tokens: int
    """Tokens of the heaviest micro-batch, which the forecast is of."""
    low_bytes: int | None = None
    """With `why`: the least that it may be. The peak is then the most."""
    why: str = ""
    """Why there is a range."""
    doubts: tuple[str, ...] = ()
    """Why it may be more, or less, by a share of `error_frac`."""
    error_frac: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The least and the most that it may be."""
        low, wider = self.low_bytes or self.peak_bytes, 1 + self.error_frac
        return int(low / wider), int(self.peak_bytes * wider)

    @property
    def fits(self) -> bool:
        """Whether the most that it may be is below what is free; True if that is not known."""
        return self.free_bytes is None or self.range_bytes[1] <= self.free_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but not by much."""
        return self.fits and self.free_bytes is not None and self.peak_bytes > TIGHT_FRAC * self.free_bytes

    def as_json(self) -> dict[str, object]:
        """Return the forecast as plan.json has it."""
        return {
            "peak_bytes": self.peak_bytes,
            "low_bytes": self.range_bytes[0],
            "high_bytes": self.range_bytes[1],
            "free_bytes": self.free_bytes,
            "fits": self.fits,
            "moment": self.moment,
            "why": self.why or None,
            "doubts": list(self.doubts),
            "micro_batch_tokens": self.micro_batch_tokens,
            "parts": dict(self.parts),
        }

    def with_free(self, free_bytes: int | None) -> MemoryForecast:
        """Return the same for another amount of free memory."""
        return replace(self, free_bytes=free_bytes)


def of_trace(trace: Trace, gradients: Set[int], vocabulary: int) -> dict[str, int]:
    """Return what a rehearsed step holds at its peak, by part.

    `gradients` are the numbers of the memories that are gradients of weights. What was allocated before backward and is
    still there is kept for it; what backward allocates itself, recomputed activations too, is working memory.
    """
    _, alive = trace.peak()
    found: dict[str, int] = dict.fromkeys(("gradients", "activations", "logits", "workspace"), 0)
    for number in alive:
        memory = trace.memories[number]
        if number in gradients:
            part = "gradients"
        elif vocabulary and len(memory.shape) >= _LOGITS and memory.shape[-1] == vocabulary:
            part = "logits"
        else:
            part = "workspace" if memory.in_backward else "activations"
        found[part] += memory.n_bytes
    return found


def highest(moments: Sequence[tuple[str, Mapping[str, int]]]) -> tuple[str, Mapping[str, int]]:
    """Return the moment whose parts are the most in all."""
    return max(moments, key=lambda moment: sum(moment[1].values()))
