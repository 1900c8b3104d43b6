"""What DeepSpeed's configuration sets: its values become those of the arguments that are not given.

An argument that is given stands, and `deepspeed.problem_of` refuses a configuration that says something else. A value
of the wrong type sets nothing here, and is refused there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from whet.config import deepspeed
from whet.config.fields import TrainingFields
from whet.config.names.deepspeed_keys import AUTO, at
from whet.config.ranks import here

_NUMBERS = {
    "gradient_clipping": "max_grad_norm", "scheduler.params.warmup_max_lr": "learning_rate",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon", "optimizer.params.weight_decay": "weight_decay",
}  # fmt: skip
_BETAS = ("adam_beta1", "adam_beta2")
_ROWS, _STEPS = deepspeed.SIZES.values()
_FORMATS = ("bf16", "fp16")
_PRECISIONS = ("precision", *_FORMATS)
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_SET = (_ROWS, _STEPS, *dict.fromkeys(_NUMBERS.values()), *_BETAS, *_SCHEDULE, "precision")
"""All fields that a configuration can set."""


def values_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the configuration in these settings has for settings that are not given."""
    config = given.get("deepspeed")
    if config is None:
        return {}
    try:
        found = deepspeed.read(config)
    except (OSError, ValueError):
        return {}
    values = {**_plain(found), **_sizes(found, given), **_schedule(found)}
    if not any(given.get(name) is not None for name in _PRECISIONS) and (precision := _precision(found)):
        values["precision"] = precision
    return {name: value for name, value in values.items() if name not in given}


def described(args: TrainingFields) -> list[str]:
    """Return the stage that the run's configuration asks for and the settings it has a value for, in parts of a line.

    Empty without a configuration.
    """
    if args.deepspeed is None:
        return []
    values = values_for({"deepspeed": args.deepspeed})
    set_here = [f"{name} {values[name]}" for name in _SET if name in values and values[name] == getattr(args, name)]
    source = "" if isinstance(args.deepspeed, Mapping) else f"{Path(str(args.deepspeed)).name}: "
    return [f"{source}stage {deepspeed.stage_of(args.deepspeed)}", *set_here]


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for path, name in _NUMBERS.items() if _is_number(value := at(found, path))}
    betas = at(found, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == len(_BETAS) and all(map(_is_number, betas)):
        values |= dict(zip(_BETAS, betas, strict=True))
    return {name: float(value) for name, value in values.items()}


def _schedule(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate, and the steps of its warm-up if they are a number."""
    schedule, steps = deepspeed.schedule_of(found), at(found, "scheduler.params.warmup_num_steps")
    if schedule is None:
        return {}
    values: dict[str, Any] = {"lr_scheduler_type": schedule[0]}
    if schedule[1]:
        values["lr_scheduler_kwargs"] = schedule[1]
    return values | ({"warmup_steps": int(steps)} if _is_count(steps) else {})


def _sizes(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of a micro-batch and the micro-batches of a step; what is missing follows from train_batch_size.

    DeepSpeed's rule: train_batch_size is the product of both and of the ranks; alone, it is that of one micro-batch.
    """
    known = {name: int(found[key]) for key, name in deepspeed.SIZES.items() if _is_count(found.get(key))}
    total = found.get("train_batch_size")
    decided = {**known, **{name: given[name] for name in (_ROWS, _STEPS) if _is_count(given.get(name))}}
    if not _is_count(total) or len(decided) == 2:
        return known
    (missing,) = {_ROWS, _STEPS} - {*decided} if decided else (_ROWS,)
    others = math.prod(decided.values()) * here().n_ranks
    rest = {} if decided else {_STEPS: 1}
    return {**known, **rest, missing: int(total) // others} if total % others == 0 else known


def _precision(found: Mapping[str, Any]) -> str | None:
    """Return the format that the sections ask for, fp32 where they leave it open; None if they ask for two."""
    on = [name for name in _FORMATS if at(found, f"{name}.enabled") is True]
    odd = any(at(found, f"{name}.enabled") not in (None, True, False, AUTO) for name in _FORMATS)
    return None if odd or len(on) > 1 else next(iter(on), "fp32")


def _is_count(value: Any) -> TypeGuard[int | float]:
    return _is_number(value) and value == int(value) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
