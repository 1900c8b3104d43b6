"""Conversion of one given value (from a flag, a file, Python code) to a field's type."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)


def read(value: object, kind: Any) -> Any:
    """Return `value` converted to the annotation `kind`; raises ValueError if that is not possible.

    Numbers may come as text: YAML reads 3e-5 as text, because it has no point.
    """
    if is_union(kind):
        return _read_union(value, get_args(kind))
    if get_origin(kind) is Literal:
        return _read_choice(value, get_args(kind))
    if get_origin(kind) is tuple:
        return _read_many(value, get_args(kind)[0])
    return _READERS[get_origin(kind) or kind](value)


def read_flag(value: object, kind: Any) -> Any:
    """Return the text of a flag converted to the field's type; `null` alone means None if the field allows it."""
    if value in ("null", ["null"]) and allows_none(kind):
        return None
    return read(value, kind)


def is_bool_word(text: str) -> bool:
    """Return whether this text reads as true or false."""
    return text.lower() in _WORDS


def is_union(kind: Any) -> bool:
    """Return whether the annotation is a union, in any spelling."""
    return get_origin(kind) in (UnionType, Union)


def is_switch(kind: Any) -> bool:
    """Return whether a field of this annotation is true or false and no text, so that its bare flag means true."""
    return kind is bool or (is_union(kind) and bool in get_args(kind) and str not in get_args(kind))


def is_many(kind: Any) -> bool:
    """Return whether a field of this annotation holds several values, so that its flag may be repeated."""
    return get_origin(kind) is tuple or (is_union(kind) and any(map(is_many, get_args(kind))))


def allows_none(kind: Any) -> bool:
    """Return whether None is one of the values."""
    return is_union(kind) and NoneType in get_args(kind)


def expected(kind: Any) -> str:
    """Return in words what the annotation asks for: "a number", "one of no, steps, epoch"."""
    if is_union(kind):
        members = [expected(member) for member in _widest(get_args(kind))]
        return " or ".join(dict.fromkeys(members))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return f"some {expected(item).removeprefix('one ')}" if get_origin(item) is Literal else "a list of texts"
    return _IN_WORDS[get_origin(kind) or kind]


def placeholder(kind: Any) -> str:
    """Return the placeholder of the value in the help text: NUMBER, TEXT, no|steps|epoch."""
    if is_union(kind):
        members = [member for member in _widest(get_args(kind)) if member is not NoneType]
        return placeholder(members[0])
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return f"{placeholder(item)},..." if get_origin(item) is Literal else placeholder(item)
    return _PLACEHOLDERS[get_origin(kind) or kind]


def _widest(members: Sequence[Any]) -> list[Any]:
    """Drop members that another member includes: a whole number is a number."""
    return [member for member in members if not (member is int and float in members)]


def _read_union(value: object, members: Sequence[Any]) -> Any:
    if value is None and NoneType in members:
        return None
    if isinstance(value, str) and value.lstrip().startswith("{"):  # JSON, where a dict is one of the values
        members = sorted(members, key=lambda member: get_origin(member) is not dict)
    for member in members:
        if member is not NoneType:
            try:
                return read(value, member)
            except ValueError:
                continue
    raise ValueError(value)


def _read_choice(value: object, choices: Sequence[str]) -> str:
    if value is False and "no" in choices:  # YAML 1.1 reads a bare `no` as false
        return "no"
    if value in choices:
        return choices[choices.index(value)]  # an enum that equals its text becomes that text
    raise ValueError(value)


def _read_many(value: object, item: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        raise ValueError(value)
    items: list[Any] = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if get_origin(item) is Literal:  # no choice contains a comma, so a comma separates two of them
        items = [part.strip() for one in items for part in (one.split(",") if isinstance(one, str) else [one])]
    return tuple(read(one, item) for one in items)


def _read_bool(value: object) -> bool:
    word = str(value).lower()
    if word not in _WORDS:
        raise ValueError(value)
    return _WORDS[word]


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)  # not through float, which would round a large seed
    number = _read_float(value)
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _read_str(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError(value)
    return str.__str__(value)  # an enum that equals its text becomes that text


def _read_dict(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)  # its error is a ValueError
    if not isinstance(value, Mapping):
        raise ValueError(value)
    return dict(value)


_READERS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str, dict: _read_dict}
_IN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a JSON object",
    NoneType: "null",
}
_PLACEHOLDERS = {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT", dict: "JSON"}
