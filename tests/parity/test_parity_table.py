"""A part of `make test-parity`: every family and every task once, through the commands' engine and whet.optimize."""

from __future__ import annotations

from typing import Any

import pytest
from padded_peers import HAS_ACCELERATE
from parity_runs import TASKS, TOLERANCE, has_task, worst

from tiny import DECODERS, FAMILIES

pytestmark = pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers' Trainer needs accelerate")


_N_STEPS = 16
"""Two epochs, each with a short last batch; 50 steps are for `make test-parity`."""


def _some() -> list[Any]:
    """Return a task for each family, and a family for each task: tasks in turn, once by day."""
    tasks, found = list(TASKS), []
    for number, family in enumerate((*FAMILIES, *DECODERS)):
        turned = [*tasks[number % len(tasks) :], *tasks[: number % len(tasks)]]
        found.append((family, next(task for task in turned if has_task(family, task))))
    missing = set(tasks) - {task for _, task in found}
    cases = found + [("bert", task) for task in sorted(missing)]
    by_day = {task: family for family, task in reversed(cases)}
    return [
        pytest.param(family, task, marks=() if by_day[task] == family else pytest.mark.night) for family, task in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "task"), _some())
def test_training_has_the_losses_of_transformers(family: str, task: str) -> None:
    found = worst(family, task, _N_STEPS)
    assert all(value <= TOLERANCE for value in found.values()), found
