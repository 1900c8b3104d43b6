"""What one technique is for, in the words of the docs: the tables of `docs/methods.md` are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Improves = Literal["speed", "memory", "both", "neither"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One technique. The file that implements it holds its card, in the constant `CARD`."""

    name: str
    """What the log and the table call it."""
    asked_by: str
    """The setting that asks for it, or "default"."""
    does: str
    """What it does, in one sentence."""
    improves: Improves
    same_result: str
    """Whether losses stay as they are: yes, no, or in which case."""
    hurts: str
    """When to leave it out."""
    source: str
    """The paper and section, or the library, that it comes from."""
    wanted_by: str = ""
    """Of a method that settings ask for: the field of MethodSettings that does, or `field=value` for one value of it.
    Only then is its file imported."""
    needs: str = ""
    """Of a method for some models alone: what a class of their modules has, by name."""
    page: str = ""
    """Its page in `docs` and the heading there: `speed.md#packing`."""
