"""Annotations for transformers' HfArgumentParser, which knows one type per field and passes texts on."""

from __future__ import annotations

from typing import Any, get_args

from whet.config.reading.values import allows_none, is_many, is_union


def simple(kind: Any) -> Any:
    """Return an annotation with which HfArgumentParser accepts what the field's reader accepts."""
    if is_many(kind):
        return str | None
    if not is_union(kind):
        return kind
    members = set(get_args(kind)) - {type(None)}
    if members == {int, float}:
        one: Any = float
    elif len(members) > 1 or any(getattr(member, "__origin__", member) is dict for member in members):
        one = str
    else:
        one = members.pop()
    if one is bool:  # its bare flag means true, whatever the default is
        return bool
    return one | None if allows_none(kind) else one
