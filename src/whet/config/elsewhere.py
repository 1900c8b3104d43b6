"""A check of settings for a run on other machines: how many ranks it has there, and whether DeepSpeed is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What the settings' rules ask a machine, for a machine that is not this one."""

    n_ranks: int
    has_deepspeed: bool


_elsewhere: ContextVar[Elsewhere | None] = ContextVar("whet_elsewhere", default=None)


def elsewhere() -> Elsewhere | None:
    """Return where the settings that are checked now will run; None if that is this process."""
    return _elsewhere.get()


@contextmanager
def checked_for(place: Elsewhere) -> Iterator[None]:
    """Check settings in this block as a process at that place would."""
    before = _elsewhere.set(place)
    try:
        yield
    finally:
        _elsewhere.reset(before)
