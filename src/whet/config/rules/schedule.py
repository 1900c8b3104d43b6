"""Rules about the learning rate schedule: its warm-up and its parameters."""

from __future__ import annotations

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule
from whet.errors import Problem

_COSINE = frozenset({"num_cycles"})
_FLOOR = frozenset({"min_lr", "min_lr_rate"})
_JUDGED = frozenset({"mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps"})
_KWARGS: dict[str, frozenset[str]] = {
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "cosine_with_min_lr": _COSINE | _FLOOR,
    "cosine_warmup_with_min_lr": _COSINE | _FLOOR | {"warmup_lr_rate"},
    "polynomial": frozenset({"lr_end", "power"}),
    "inverse_sqrt": frozenset({"timescale"}),
    "warmup_stable_decay": _COSINE
    | {"num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio"},
    "reduce_lr_on_plateau": _JUDGED,
    "greedy": _JUDGED | {"warmup", "max_lr", "smooth", "window_size", "reset_start", "verbose"},
}
"""The parameters of each schedule besides the number of steps; the others have none."""
_SHAPES = ("linear", "cosine", "1-sqrt")
_WORDS: dict[str, tuple[object, ...]] = {
    "warmup_type": _SHAPES, "decay_type": _SHAPES, "mode": ("min", "max"), "threshold_mode": ("rel", "abs"),
    "smooth": (True, False), "verbose": (True, False),
}  # fmt: skip
"""Parameters that are not numbers -> their values."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that change at evaluations, by a metric."""
WITHOUT_WARMUP = ("constant", *BY_METRIC)
"""Schedules that start at the full learning rate."""
_LR_END = 1e-7
"""The final learning rate of transformers' polynomial schedule by default."""


def has_no_warmup(args: TrainingFields) -> Problem | None:
    """Some schedules would ignore the warm-up."""
    if args.lr_scheduler_type not in WITHOUT_WARMUP or not (args.warmup_steps or args.warmup_ratio):
        return None
    return Problem(
        what=f"the {args.lr_scheduler_type} schedule has no warm-up",
        got=f"warmup_steps={args.warmup_steps}, warmup_ratio={args.warmup_ratio}",
        why=f"{args.lr_scheduler_type} starts at the full learning rate",
        fix="use --lr_scheduler_type constant_with_warmup, or leave the warm-up out",
    )


def knows_its_kwargs(args: TrainingFields) -> Problem | None:
    """A schedule takes only its own parameters."""
    known = _KWARGS.get(args.lr_scheduler_type, frozenset())
    strange = sorted(set(args.lr_scheduler_kwargs or {}) - known)
    if not strange:
        return None
    return Problem(
        what="lr_scheduler_kwargs has parameters that the schedule does not take",
        got=strange,
        why=f"the {args.lr_scheduler_type} schedule takes {', '.join(sorted(known)) or 'no parameters'}",
        fix="take these out of --lr_scheduler_kwargs, or choose another --lr_scheduler_type",
    )


def kwargs_are_values(args: TrainingFields) -> Problem | None:
    """A parameter is a number, or one of a few words."""
    strange = {name: value for name, value in (args.lr_scheduler_kwargs or {}).items() if not _fits(name, value)}
    if not strange:
        return None
    words = [f"{name} one of {', '.join(map(str, _WORDS[name]))}" for name in strange if name in _WORDS]
    return Problem(
        what="lr_scheduler_kwargs has a value that does not fit",
        got=strange,
        why="; ".join(words) or "the parameters of the schedules are numbers",
        fix="write numbers without quotes: --lr_scheduler_kwargs '{\"power\": 2}', for example",
    )


def polynomial_falls(args: TrainingFields) -> Problem | None:
    """The schedule of transformers refuses to rise."""
    end = (args.lr_scheduler_kwargs or {}).get("lr_end", _LR_END)
    if args.lr_scheduler_type != "polynomial" or not _is_number(end) or args.learning_rate > end:
        return None
    return Problem(
        what="the polynomial schedule does not fall",
        got=f"learning_rate={args.learning_rate}, lr_end={end}",
        why=f"it falls from learning_rate to lr_end, which is {_LR_END} by default",
        fix="use a --learning_rate above lr_end, or a lower lr_end in --lr_scheduler_kwargs",
    )


def has_one_floor(args: TrainingFields) -> Problem | None:
    """The cosine schedule with a lowest rate needs that rate, once."""
    given = sorted(_FLOOR & set(args.lr_scheduler_kwargs or {}))
    if args.lr_scheduler_type not in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") or len(given) == 1:
        return None
    return Problem(
        what=f"the {args.lr_scheduler_type} schedule needs one lowest learning rate",
        got=given or "none",
        why="min_lr gives it as a learning rate, min_lr_rate as a share of learning_rate",
        fix="use --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}', for example",
    )


def has_a_decay(args: TrainingFields) -> Problem | None:
    """The length of the last part of warmup_stable_decay has no default."""
    if args.lr_scheduler_type != "warmup_stable_decay" or "num_decay_steps" in (args.lr_scheduler_kwargs or {}):
        return None
    return Problem(
        what="the warmup_stable_decay schedule needs num_decay_steps",
        got=args.lr_scheduler_kwargs or "none",
        why="it says over how many steps at the end the learning rate falls",
        fix="use --lr_scheduler_kwargs '{\"num_decay_steps\": 100}', for example",
    )


def is_evaluated(args: TrainingFields) -> Problem | None:
    """A schedule that follows a metric never changes without evaluations."""
    if args.lr_scheduler_type not in BY_METRIC or args.eval_strategy != "no":
        return None
    return Problem(
        what=f"the {args.lr_scheduler_type} schedule needs evaluations",
        got=f"eval_strategy={args.eval_strategy}",
        why="it changes the learning rate by the value of metric_for_best_model at each evaluation",
        fix="use --eval_strategy steps or --eval_strategy epoch",
    )


def _fits(name: str, value: object) -> bool:
    if name in _WORDS:
        return any(value is word or (value == word and isinstance(word, str)) for word in _WORDS[name])
    return _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


SCHEDULE_RULES: tuple[Rule, ...] = (
    has_no_warmup,
    knows_its_kwargs,
    kwargs_are_values,
    polynomial_falls,
    has_one_floor,
    has_a_decay,
    is_evaluated,
)
