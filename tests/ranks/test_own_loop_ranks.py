"""`whet.optimize` in a loop that other libraries share between ranks."""

from __future__ import annotations

import pytest
from many import Jobs

pytestmark = pytest.mark.reliability

_LIBRARIES = ("torch", "accelerate")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("ranks"))
    for library in _LIBRARIES:
        for optimized in (False, True):
            jobs.add(f"{library} {optimized}", "own_loop", 2, by=library, optimized=optimized)
    return jobs.run()


@pytest.mark.parametrize("library", _LIBRARIES)
def test_optimized_model_trains_like_the_plain_one_on_two_ranks(found: Jobs, library: str) -> None:
    """The gradient of the vocabulary, which whet keeps by rows, is the sum of both ranks too."""
    for plain, optimized in zip(found[f"{library} False", 2], found[f"{library} True", 2], strict=True):
        assert optimized["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        for a, b in zip(plain["weights"], optimized["weights"], strict=True):
            assert b == pytest.approx(a, abs=2e-2)  # AdamW takes steps of 1e-2 in weights whose gradient is rounding


@pytest.mark.parametrize("library", _LIBRARIES)
def test_ranks_of_an_optimized_model_end_with_the_same_bits(found: Jobs, library: str) -> None:
    first, second = found[f"{library} True", 2]
    assert first["digest"] == second["digest"]
