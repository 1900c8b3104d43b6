"""A part of a checkpoint that no rank has alone: it is collected for the time of a save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from whet.train.state import State


class CollectedState(ABC):
    """The state of the optimizer, which the ranks share."""

    _complete: State | None = None

    @abstractmethod
    def collect(self) -> State | None:
        """Return the state of all ranks, as one process has it; None on a rank that does not save. All call this."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the state for the block, in which `state` returns it. All ranks enter it."""
        self._complete = self.collect()
        try:
            yield
        finally:
            self._complete = None

    def state(self) -> State:
        """Return the state of all ranks, as one process has it: on rank 0, within `collected`."""
        assert self._complete is not None
        return self._complete

    def load_state(self, saved: State) -> None:
        """Never called: a checkpoint is restored before the ranks share the optimizer."""
        raise AssertionError
