"""What `whet doctor MODEL` tells about a model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """Whether a model trains without padding here, and which of its parts run fused."""

    model: str
    model_type: str
    model_class: str
    packed: bool
    """Whether its encoder runs without padding."""
    how: str
    """What the answer rests on: a family's file, a proof, or why the model needs its padding."""
    head: str
    """How batches reach the head in whet's own training."""
    fused: dict[str, int]
    """How many modules of each class run on native operators."""
    called: dict[str, str]
    """Parts inside of these that are called as they are, and why."""
    isa: str | None
    """The instruction set of the native operators; None: they are not in use."""
