"""Which of two number formats is faster here, by passes timed in alternation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

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
    """Infinite: the device has no memory for a pass over one row in it."""
    other_s: float
    n_rounds: int

    @property
    def speedup(self) -> float:
        """How many times as fast as fp32 the other format is."""
        return self.fp32_s / self.other_s

    @property
    def chosen(self) -> str:
        """What `auto` takes, if the other format is bf16."""
        return "bf16" if self.speedup >= MARGIN else "fp32"

    @property
    def in_short(self) -> str:
        """What was measured of bf16, for a line about a run."""
        return _NO_FP32 if math.isinf(self.fp32_s) else f"bf16 measured {self.speedup:.2f}x fp32 here"

    @property
    def in_words(self) -> str:
        """What was measured of bf16 and what it takes to be chosen, for the log."""
        if math.isinf(self.fp32_s):
            return _NO_FP32
        return f"bf16 runs at {self.speedup:.2f} times the speed of fp32, and {MARGIN:.2f} are asked for"


_NO_FP32 = "there is no memory for one row in fp32"


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


def with_rows_that_fit(n_rows: int, timed: Callable[..., T]) -> T:
    """Return what `timed` returns for so many rows, or for half of them each time that a GPU has no memory for them.

    It is called with a number of rows, and `fp32`: whether passes in fp32 are timed. They are left out if they do not
    fit with one row either, as the other format may. Raises torch.OutOfMemoryError if that does not.
    """
    fp32 = True
    while True:
        try:
            return timed(n_rows, fp32=fp32)
        except torch.OutOfMemoryError:
            if not fp32:
                raise
        fp32, n_rows = n_rows > 1, max(n_rows // 2, 1)  # here the error is gone, and with it what its passes held


def alternate(
    fp32: Callable[[], None] | None,
    other: Callable[[], None],
    clock: Callable[[], float],
    device: torch.device,
    *,
    n_rounds: int = N_ROUNDS,
) -> Times:
    """Return how long the two passes take, run in alternation; the first of each counts only if it used up the time.

    A pass lasts until the device has finished it. Rounds end early once all of them agree: each time of one format
    beats each of the other, bf16 by its margin. `fp32` None: it does not fit into memory.
    """
    if fp32 is None:
        return Times(math.inf, _seconds(other, clock, device), 1)
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
