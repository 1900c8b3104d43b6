"""Which of two number formats is faster here, by passes timed in alternation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MARGIN = 1.15
"""bf16 must be this many times as fast as fp32: a smaller gain may come from a busy machine, and bf16 costs digits."""
TIMED_TOKENS = 512
"""Tokens of a timed pass on a CPU, about: enough for products at full speed, few enough to take only seconds."""
FORWARD, FORWARD_AND_BACKWARD = 2.0, 6.0
"""Operations of the products for each weight and token, as transformers counts them."""
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


def flop(n_weights: float, passes: float = FORWARD_AND_BACKWARD) -> float:
    """Return the operations in the products of TIMED_TOKENS tokens with this many weights."""
    return passes * n_weights * TIMED_TOKENS


def is_worth_timing(n_weights: float, passes: float = FORWARD_AND_BACKWARD) -> bool:
    """Return whether the products of these weights are large enough to gain by a format."""
    return flop(n_weights, passes) >= LEAST_FLOP


def n_timed_rows(n_rows: int, n_tokens: int, device: torch.device) -> int:
    """Return how many of a batch's rows a timed pass computes: on a CPU those of about TIMED_TOKENS tokens.

    A GPU computes so few tokens in less time than the program launches their kernels, in each format.
    """
    if device.type != "cpu" or n_tokens <= TIMED_TOKENS:
        return n_rows
    return max(1, n_rows * TIMED_TOKENS // n_tokens)


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
