"""Which cases of a test stand for all of them by day: those in which each pair of values of two parameters occurs.

Of tests that are marked `each_value`, whose cases are complete trainings: those in which each value occurs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations

import pytest

Case = Sequence[Hashable]
NOT_BY_DAY = ("reliability", "gate", "night")
"""Marks of what `make test` leaves out."""


def pairs(cases: Sequence[Case], *, together: int = 2) -> list[int]:
    """Return the numbers of cases that hold every pair of values that any case holds, in order; or every `together`.

    Greedy: each time the case with the most new pairs, the first of them. A test of one or two parameters keeps all.
    """
    held = [frozenset(combinations(enumerate(case), min(together, len(case)))) for case in cases]
    seen: set[Hashable] = set()
    chosen: list[int] = []
    best = [(-len(of_case), number) for number, of_case in enumerate(held)]
    heapq.heapify(best)
    while best:
        said, number = heapq.heappop(best)
        n_new = len(held[number] - seen)
        if n_new != -said:  # since it was counted, others have been chosen
            if n_new:
                heapq.heappush(best, (-n_new, number))
        elif n_new:
            chosen.append(number)
            seen |= held[number]
    return sorted(chosen)


def for_the_night(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that those of the day stand for; a case that does not run by day stands for none."""
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if len(_values(item)) > 1 and not any(map(item.get_closest_marker, NOT_BY_DAY)):
            tests[item.nodeid.partition("[")[0]].append(item)
    for of_test in tests.values():
        together = 1 if of_test[0].get_closest_marker("each_value") else 2
        if len(_values(of_test[0])) > together:
            kept = set(pairs([_values(item) for item in of_test], together=together))
            yield from (item for number, item in enumerate(of_test) if number not in kept)


def _values(item: pytest.Item) -> Case:
    """Return the value of each parameter, as its part of the test's name; what is given together is one parameter."""
    given = getattr(item, "callspec", None)
    return () if given is None else tuple(given._idlist)
