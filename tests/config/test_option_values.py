"""Values: what each kind of field takes, from flags, files and Python."""

from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.values import expected, placeholder, read, read_flag

_Choice = Literal["no", "steps"]


class _Enum(str, Enum):  # noqa: UP042 - as transformers writes its enums
    STEPS = "steps"


@pytest.mark.parametrize(
    ("kind", "value", "held"),
    [
        (bool, "True", True),
        (bool, "no", False),
        (bool, 1, True),
        (int, "12", 12),
        (int, "1e3", 1000),
        (int, 12.0, 12),
        (int, np.int64(12), 12),
        (int, str(2**63 + 1), 2**63 + 1),  # by way of float it would be 2**63
        (float, "3e-5", 3e-5),  # YAML 1.1 reads this as a text
        (float, 1, 1.0),
        (int | float, "0.5", 0.5),
        (int | float, "500", 500),
        (int | None, None, None),
        (str, "12", "12"),
        (dict[str, Any], '{"power": 2}', {"power": 2}),
        (_Choice, _Enum.STEPS, "steps"),
        (_Choice, False, "no"),  # YAML 1.1 reads a bare no as false
        (tuple[_Choice, ...], "no,steps", ("no", "steps")),
        (tuple[_Choice, ...], ["no", "steps"], ("no", "steps")),
        (tuple[str, ...], "Who, and when?", ("Who, and when?",)),
        (tuple[_Choice, ...], "steps", ("steps",)),
    ],
)
def test_valid_values_are_accepted(kind: Any, value: object, held: object) -> None:
    got = read(value, kind)
    assert got == held
    assert type(got) is type(held)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, "perhaps"),
        (bool, None),
        (int, "1.5"),
        (int, True),
        (int, ""),
        (float, "inf"),
        (float, [1]),
        (str, 12),
        (str, None),
        (dict[str, Any], "3"),
        (_Choice, "daily"),
        (_Choice, ["no"]),
        (tuple[_Choice, ...], "no,daily"),
        (tuple[str, ...], {"a": 1}),
        (int | None, "null"),  # only a flag says null in words
    ],
)
def test_invalid_values_are_refused(kind: Any, value: object) -> None:
    with pytest.raises(ValueError):
        read(value, kind)


@given(st.integers())
def test_every_whole_number_is_read_as_it_is_written(number: int) -> None:
    assert read_flag(str(number), int) == number
    assert read_flag(str(number), int | float | None) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_read_as_it_is_written(number: float) -> None:
    assert read_flag(str(number), float) == number


@given(st.text())
def test_every_text_is_either_read_or_refused(text: str) -> None:
    for kind in (bool, int, float, dict[str, Any], _Choice, tuple[_Choice, ...], int | float | None):
        try:
            read_flag(text, kind)
        except ValueError:
            continue


def test_null_means_none_only_if_none_is_possible() -> None:
    assert read_flag("null", str | None) is None
    assert read_flag("null", str) == "null"


def test_types_are_described_in_help_and_errors() -> None:
    assert expected(int | float | None) == "a number or null"
    assert expected(tuple[_Choice, ...]) == "some of no, steps"
    assert expected(_Choice) == "one of no, steps"
    assert placeholder(int | float | None) == "NUMBER"
    assert placeholder(bool | None) == "true|false"
    assert placeholder(tuple[_Choice, ...]) == "no|steps,..."
