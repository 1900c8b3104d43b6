"""The numbers in a checkpoint's small files, checked for their kind: a forged folder may hold anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST = 1 << 53
"""Whole numbers beyond this are no counts."""
Check = Callable[[Any], bool]
_LARGEST_RATE = 1e6
"""Rates and decays beyond this are not settings of a run: one step would leave no finite weight."""
_MOST_OF = {
    "lr": _LARGEST_RATE,
    "initial_lr": _LARGEST_RATE,
    "weight_decay": _LARGEST_RATE,
    "eps": _LARGEST_RATE,
    "momentum": _LARGEST_RATE,
    "betas": 1.0,
}
"""Settings of an optimizer by torch's names, none of them negative -> the most that a run writes."""


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST**4 and math.isfinite(value)


def _loss(value: Any) -> bool:
    """A loss may have been NaN or infinite, which JSON holds as a word."""
    return _number(value) or value in ("nan", "inf", "-inf")


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _text(value: Any) -> bool:
    return isinstance(value, str)


STATE: Mapping[str, Check] = {
    "global_step": _count,
    "epoch": _or_none(_number),
    "log_history": _list_of(_object),
    "total_flos": _number,
    "best_metric": _or_none(_number),
    "best_global_step": _or_none(_count),
    "best_model_checkpoint": _or_none(_text),
}
"""What is taken from trainer_state.json."""
RUN: Mapping[str, Check] = {
    "loss_total": _number,
    "n_losses": _count,
    "window": _list_of(_loss),
    "n_bad_in_a_row": _count,
    "n_left_out": _count,
    "n_skipped": _count,
    "losses": _list_of(_number),
    "pending": _or_none(_object),
    "checkpoints": _list_of(_text),
    "precision": _object,
}
"""What is taken from meter.json."""


def require_kinds(values: Any, kinds: Mapping[str, Check], file: str) -> None:
    """Raise ValueError for a value of another kind than whet writes; what is missing is the reader's matter."""
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object")
    for name, check in kinds.items():
        if name in values and not check(values[name]):
            raise ValueError(f"{name} in {file} is {str(values[name])[:60]!r}, which no run writes there")


def require_step(found: Any, step: int | None, file: str) -> None:
    """Raise ValueError where a file is of another step than the folder that holds it."""
    if found != step:
        raise ValueError(f"global_step in {file} is {found!r}, and the checkpoint is of step {step}")


def require_groups(kept: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where the settings of a saved optimizer are of another kind than those of a new one."""
    for old, new in zip(kept, fresh, strict=True):
        for name in new.keys() & old.keys() - {"params"}:
            if not _alike(old[name], new[name]) or not _allowed(name, old[name]):
                raise ValueError(f"{name} of the saved optimizer is {old[name]!r}")


def _allowed(name: str, value: Any) -> bool:
    """Return whether a setting by this name may have this value: torch checks rates and decays of new groups only."""
    most = _MOST_OF.get(name)
    values = value if isinstance(value, tuple | list) else [value]
    return most is None or all(one is None or (_number(one) and 0 <= one <= most) for one in values)


def _alike(old: Any, new: Any) -> bool:
    if type(new) in (int, float) or hasattr(new, "item"):  # a rate may be a tensor of one number
        return _number(old)
    if isinstance(new, tuple | list):
        return isinstance(old, tuple | list) and len(old) == len(new) and all(map(_alike, old, new))
    return old is None or new is None or type(old) is type(new)
