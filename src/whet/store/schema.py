"""Checks the values in a checkpoint's JSON files: a forged folder may hold anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST = 1 << 53
"""Larger integers are not counts."""
Check = Callable[[Any], bool]
_LARGEST_RATE = 1e6
"""Larger rates and decays cannot come from a run: one step would leave no finite weight."""
_MOST_OF = {
    "lr": _LARGEST_RATE,
    "initial_lr": _LARGEST_RATE,
    "weight_decay": _LARGEST_RATE,
    "eps": _LARGEST_RATE,
    "momentum": _LARGEST_RATE,
    "betas": 1.0,
}
"""Settings of an optimizer by torch's names, none of them negative -> the largest value that a run writes."""


def anything(_: Any) -> bool:
    """Return True: for values of a user, whose form is theirs."""
    return True


def count(value: Any) -> bool:
    """Return whether this is a count: an integer that is not negative."""
    return type(value) is int and 0 <= value < MOST


def whole(value: Any) -> bool:
    """Return whether this is an integer, such as a seed of 63 bits."""
    return type(value) is int and abs(value) < MOST**4


def number(value: Any) -> bool:
    """Return whether this is a finite number of a plausible size."""
    return type(value) in (int, float) and abs(value) < MOST**4 and math.isfinite(value)


def number_or_infinity(value: Any) -> bool:
    """Return whether this is a number, or an infinite one as Python reads it from JSON."""
    return number(value) or (type(value) is float and math.isinf(value))


def loss(value: Any) -> bool:
    """Return whether this is a loss: a number, or a word for NaN or infinity, which JSON does not have."""
    return number(value) or value in ("nan", "inf", "-inf")


def list_of(check: Check) -> Check:
    """Return a check for lists of such values."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def object_of(check: Check) -> Check:
    """Return a check for JSON objects with such values."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def optional(check: Check) -> Check:
    """Return a check for such a value or None."""
    return lambda value: value is None or check(value)


def json_object(value: Any) -> bool:
    """Return whether this is a JSON object."""
    return isinstance(value, dict)


def text(value: Any) -> bool:
    """Return whether this is a string."""
    return isinstance(value, str)


TRAINER_STATE: Mapping[str, Check] = {
    "global_step": count,
    "train_batch_size": optional(count),
    "epoch": optional(number),
    "log_history": list_of(json_object),
    "total_flos": number,
    "best_metric": optional(number_or_infinity),
    "best_global_step": optional(count),
    "best_model_checkpoint": optional(text),
}
"""The entries that are read from trainer_state.json."""


def require_types(values: Any, kinds: Mapping[str, Check], file: str) -> None:
    """Raise ValueError for a value of another type than whet writes; missing values are not checked."""
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object")
    for name, check in kinds.items():
        if name in values and not check(values[name]):
            raise ValueError(f"{name} in {file} is {str(values[name])[:60]!r}, which no run writes there")


def require_all(values: Any, kinds: Mapping[str, Check], part: str) -> None:
    """Raise ValueError if a value of the part's state is missing, or of another type than whet writes."""
    require_types(values, kinds, part)
    if missing := sorted(kinds.keys() - values.keys()):
        raise ValueError(f"{missing[0]} is missing in the state of {part}")


def require_step(found: Any, step: int | None, file: str) -> None:
    """Raise ValueError if a file is of another step than its folder."""
    if found != step:
        raise ValueError(f"global_step in {file} is {found!r}, and the checkpoint is of step {step}")


def require_groups(kept: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the settings of a saved optimizer have other types than those of a new one."""
    for old, new in zip(kept, fresh, strict=True):
        for name in new.keys() & old.keys() - {"params"}:
            if not _alike(old[name], new[name]) or not _allowed(name, old[name]):
                raise ValueError(f"{name} of the saved optimizer is {old[name]!r}")


def _allowed(name: str, value: Any) -> bool:
    """Return whether a setting of this name may have this value: torch checks rates and decays of new groups only."""
    most = _MOST_OF.get(name)
    values = value if isinstance(value, tuple | list) else [value]
    return most is None or all(one is None or (number(one) and 0 <= one <= most) for one in values)


def _alike(old: Any, new: Any) -> bool:
    if type(new) in (int, float) or hasattr(new, "item"):  # a rate may be a tensor of one number
        return number(old)
    if isinstance(new, tuple | list):
        return isinstance(old, tuple | list) and len(old) == len(new) and all(map(_alike, old, new))
    return old is None or new is None or type(old) is type(new)
