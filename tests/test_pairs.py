"""The cases that run by day hold every pair of values of two parameters; tests of two parameters keep all."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairs import pairs


@pytest.mark.parametrize("sizes", [(2, 3, 4), (5, 4, 2), (2, 2, 2, 2, 2), (11, 3, 2, 2), (3, 1, 1)])
def test_every_pair_occurs_in_few_cases(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[number] for number in pairs(cases)]
    for first, second in combinations(range(len(sizes)), 2):
        assert {(case[first], case[second]) for case in chosen} == {*product(range(sizes[first]), range(sizes[second]))}
    largest, next_largest = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * next_largest <= len(chosen) <= 2 * largest * next_largest


def test_a_case_that_alone_holds_a_pair_is_kept() -> None:
    cases = [("a", 1, True), ("a", 2, True), ("b", 1, False), ("a", 1, False), ("c", 3, True)]
    kept = pairs(cases)
    assert 4 in kept
    assert {(cases[n][0], cases[n][2]) for n in kept} == {("a", True), ("a", False), ("b", False), ("c", True)}


def test_each_value_occurs_in_as_few_cases_as_the_longest_parameter_has_values() -> None:
    cases = list(product("abcde", "xy", range(3)))
    chosen = [cases[number] for number in pairs(cases, together=1)]
    assert [set(values) for values in zip(*chosen, strict=True)] == [{*"abcde"}, {*"xy"}, {0, 1, 2}]
    assert len(chosen) == 5


@pytest.mark.parametrize("cases", [[("a",), ("b",), ("a",)], [], [()]])
def test_fewer_parameters_have_their_values(cases: list[tuple[str, ...]]) -> None:
    assert {cases[n] for n in pairs(cases)} - {()} == {case for case in cases if case}
