"""The choice of a precision on a machine where other programs run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from whet.precision import compare


def _clock(seconds: list[float]) -> Callable[[], float]:
    """A clock that has gone on by the next of these seconds at each second look."""

    def looks() -> Iterator[float]:
        now = 0.0
        for one in seconds:
            yield now
            now += one
            yield now

    return looks().__next__


def test_most_rounds_disturbed_by_other_programs_do_not_hide_the_faster_format() -> None:
    fp32 = [1.0, 0.3, 0.9, 0.35, 0.8, 0.3]
    bf16 = [1.0, 0.9, 0.8, 0.1, 0.9, 0.7]
    clock = _clock([one for both in zip(fp32, bf16, strict=True) for one in both])
    found = compare.alternate(lambda: None, lambda: None, clock, torch.device("cpu"))
    assert (found.fp32_s, found.other_s) == (pytest.approx(0.3), pytest.approx(0.1))
    assert found.speedup > compare.MARGIN


@pytest.mark.parametrize(
    ("fp32", "bf16", "n_rounds"),
    [
        ([1.0, 0.3, 0.4], [1.0, 0.2, 0.25], 2),  # bf16 is faster by its margin in every round
        ([1.0, 0.3, 0.4, 0.3], [1.0, 0.2, 0.3, 0.2], None),  # not clearly: 0.3 s of each
        ([1.0, 0.2, 0.25], [1.0, 0.3, 0.4], 2),
        ([1.0, 0.2, 0.35], [1.0, 0.3, 0.4], None),
        ([9.0, 0.3, 0.4], [0.1, 0.2, 0.25], 2),  # the first round counts for neither
    ],
)
def test_rounds_end_once_all_of_them_agree(fp32: list[float], bf16: list[float], n_rounds: int | None) -> None:
    filled = [one + one[-1:] * (compare.N_ROUNDS + 1 - len(one)) for one in (fp32, bf16)]
    clock = _clock([one for both in zip(*filled, strict=True) for one in both])
    found = compare.alternate(lambda: None, lambda: None, clock, torch.device("cpu"))
    assert found.n_rounds == (n_rounds or compare.N_ROUNDS)
    assert (found.fp32_s, found.other_s) == (pytest.approx(min(fp32[1:])), pytest.approx(min(bf16[1:])))
