"""A test's own configuration of accelerate, which keeps one for the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Forget what tests before this one configured, and what it configured."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState):
        state._reset_state()
