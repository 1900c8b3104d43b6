"""Which of two number formats is faster here, by passes timed in alternation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MARGIN = 1.15
"""bf16 must be this many times as fast as fp32: a smaller gain may come from a busy machine, and bf16 costs digits."""
LEAST_FLOP = 1e9
"""Products of fewer operations take a few milliseconds on one core; such a pass spends its time in calls."""
FEWEST_ROUNDS = 2
N_ROUNDS = 5
BUDGET_S = 15.0
"""No further round begins after this time: noise hardly affects passes that long."""


@dataclass(frozen=True)
class Times:
    """The shortest times of one pass in fp32 and in another format: other programs only ever add to a time."""

    fp32_s: float
    other_s: float
    n_rounds: int

    @property
    def speedup(self) -> float:
        """How many times as fast as fp32 the other format is."""
        return self.fp32_s / self.other_s


def alternate(
    fp32: Callable[[], None],
    other: Callable[[], None],
    clock: Callable[[], float],
    device: torch.device,
    *,
    n_rounds: int = N_ROUNDS,
) -> Times:
    """Return how long the two passes take, run in alternation; the first of each counts only if it used up the time.

    A pass lasts until the device has finished it. Rounds end early once all of them agree: each time of one format
    beats each of the other, bf16 by its margin.
    """
    rounds: list[Sequence[float]] = []
    while len(rounds) <= n_rounds and sum(map(sum, rounds)) < BUDGET_S and not _agree(rounds[1:]):
        rounds.append([_seconds(one, clock, device) for one in (fp32, other)])
    counted = rounds[1:] or rounds
    fp32_s, other_s = (min(column) for column in zip(*counted, strict=True))
    return Times(fp32_s, other_s, len(counted))


def _agree(rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether the slowest of one format is faster than the fastest of the other, bf16 by its margin."""
    if len(rounds) < FEWEST_ROUNDS:
        return False
    fp32, other = zip(*rounds, strict=True)
    return min(fp32) >= MARGIN * max(other) or max(fp32) <= min(other)


def _seconds(one: Callable[[], None], clock: Callable[[], float], device: torch.device) -> float:
    started_s = clock()
    one()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(clock() - started_s, 1e-9)
