"""What `whet tune` is asked for: which settings are searched and over which values. Nothing here imports torch."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, at_least, broken_if
from whet.config.settings import broken_rules, checked, nearest, options_of
from whet.config.values import read_flag
from whet.errors import ConfigError, Problem, WhetError

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_ROUNDING = 1e-6
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_OWN_BY_TRIAL = {
    **dict.fromkeys(("output_dir", "overwrite_output_dir", "resume_from_checkpoint"), "each trial has its own"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "dry_run", "auto", "push_to_hub"), "it says what is done"),
    **dict.fromkeys(("train_file", "validation_file", "test_file", "dataset_name", "max_eval_samples"),
                    "scores are compared on the same data"),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better", "metric_name"), "trials are compared by it"),
    **dict.fromkeys(("seed", "seeds", "data_seed"), "a lucky seed is no better setting; --seeds shows their spread"),
}  # fmt: skip
"""Settings that are not searched, and why."""


def seconds_of(text: str) -> float | None:
    """Return a time such as 90s, 30m, 2h or 600, in seconds; None if it is none."""
    found = _TIME.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _UNITS_S[found[2]]


@dataclass(frozen=True)
class Values:
    """The values of one setting: a choice of some, or a range of numbers."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Whether equal factors count alike, not equal differences."""
    step: float | None = None
    is_whole: bool = False
    """Whether the setting takes whole numbers alone."""

    def ends(self) -> Sequence[Any]:
        """Return values that every trial's must be like: all choices, or both ends."""
        return self.choices or [self.number(self.low), self.number(self.high)]

    def number(self, value: float) -> Any:
        """Return a number of the range in the type of the setting."""
        return round(value) if self.is_whole else value

    @property
    def count(self) -> int | None:
        """How many values there are; None: as many as there are numbers of the range."""
        if self.choices:
            return len(self.choices)
        return None if self.every is None else int((self.high - self.low) / self.every + _ROUNDING) + 1

    @property
    def every(self) -> float | None:
        """The difference of neighbouring numbers of the range; None: any number is in it."""
        step = self.step or 1
        return float(max(round(step), 1)) if self.is_whole else self.step

    def at(self, place: int) -> Any:
        """Return the value of this place, from 0 to `count`."""
        if self.choices:
            return self.choices[place]
        return self.number(min(self.low + place * (self.every or 0.0), self.high))

    def place_of(self, value: Any) -> int | None:
        """Return the place of a value that a trial had; None if there is no such place."""
        if self.choices:
            return next((place for place, one in enumerate(self.choices) if one == value), None)
        place = (value - self.low) / (self.every or 1.0)
        return round(place) if abs(place - round(place)) < _ROUNDING else None

    def has(self, value: Any) -> bool:
        """Return whether a trial could have this value."""
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


def values_of(text: str, kinds: Mapping[str, Any]) -> Values:
    """Return what NAME=VALUES asks for; ValueError, with the reason, if it asks for nothing."""
    name, equals, rest = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not rest.strip():
        raise ValueError("it is no NAME=VALUES")
    if name in _OWN_BY_TRIAL:
        raise ValueError(f"{name} is not searched: {_OWN_BY_TRIAL[name]}")
    if name not in kinds:
        like = nearest(name, list(kinds))
        raise ValueError(f"there is no setting {name!r}" + (f"; did you mean {like}?" if like else ""))
    kind = kinds[name]
    numbers = {float, int} & {kind, *get_args(kind)}
    if ":" not in rest or not numbers:
        choices = [_read(name, word.strip(), kind) for word in _split(rest)]
        choices = [one for place, one in enumerate(choices) if one not in choices[:place]]  # JSON objects have no hash
        if len(choices) < 2:
            raise ValueError(f"{name} has one value; give it by --{name}, or several here")
        return Values(name, choices=tuple(choices))
    low, high, *more = (word.strip() for word in rest.split(":"))
    is_whole = float not in numbers
    found = Values(name, low=_number(low), high=_number(high), log=more == ["log"], is_whole=is_whole,
                   step=_number(more[0]) if more and more != ["log"] else None)  # fmt: skip
    if len(more) > 1 or found.low >= found.high or (found.step is not None and found.step <= 0):
        raise ValueError("a range is LOW:HIGH, LOW:HIGH:log or LOW:HIGH:STEP, with LOW below HIGH")
    if found.log and found.low <= 0:
        raise ValueError(f"a range with log begins above 0, not at {low}")
    if is_whole and not (found.low.is_integer() and found.high.is_integer()):
        raise ValueError(f"{name} takes whole numbers")
    return found


def _split(text: str) -> list[str]:
    """Return what commas separate, outside of JSON objects."""
    found, depth = [""], 0
    for sign in text:
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0:
            found.append("")
        else:
            found[-1] += sign
    return found


def _read(name: str, word: str, kind: Any) -> Any:
    try:
        return read_flag(word, kind)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{word!r} is no value of {name}") from error


def _number(word: str) -> float:
    try:
        found = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"{word!r} is not finite")
    return found


_RULES: tuple[Rule, ...] = (
    broken_if(
        "names_a_setting_to_search",
        ("search",),
        lambda asked: not asked.search,
        what="nothing is searched",
        why="a trial differs from another in the values of some settings",
        fix="name settings and their values: --search learning_rate=1e-5:1e-3:log num_train_epochs=2,4",
    ),
    at_least("trials", 1, "a search has a trial"),
    at_least("min_epochs", 0, "it is how many epochs each trial takes"),
    broken_if(
        "time_limit_is_a_time",
        ("time_limit",),
        lambda asked: asked.time_limit is not None and not seconds_of(asked.time_limit),
        what="time_limit is not a time",
        why="it is a number with a unit, s, m, h or d",
        fix="write it as --time_limit 30m or --time_limit 2h",
    ),
    at_least("keep_trials", 0, "it is a number of trials"),
)


@checked(headings={"task": "Search"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class TuneArguments:
    """Which settings are searched, and for how long."""

    task: str | None = None
    """The task: the name of its command, such as classify. Comes first."""
    search: tuple[str, ...] = field(default=(), metadata={"required": True})
    """Settings and their values: NAME=A,B,C for a choice, NAME=LOW:HIGH for a range, with :log for equal factors or
    :STEP for equal steps. Several, or one flag each."""
    trials: int | None = None
    """How many trainings; one that fails counts, too. null: 20, or with time_limit as many as are forecast to fit."""
    time_limit: str | None = None
    """Begin no training after this time, such as 30m or 2h, and end the one that runs then."""
    min_epochs: int = 1
    """Evaluations that each trial takes before it may be dropped: it is if its score is below the median of the earlier
    trials at the same epoch, once five are complete."""
    keep_trials: int = 1
    """Keep the models of this many of the best trials; of the others their results, report and log stay."""


def space_of(asked: TuneArguments, job: Any, args: TrainingArguments) -> list[Values]:
    """Return what is searched; ConfigError for what cannot be."""
    found, problems = _parsed(asked, job, args)
    if problems:
        raise ConfigError.of(problems)
    return found


def _parsed(asked: TuneArguments, job: Any, args: TrainingArguments) -> tuple[list[Values], list[Problem]]:
    kinds = {name: one.kind for part in (type(job), type(args)) for name, one in options_of(part).items()}
    found: list[Values] = []
    problems: list[Problem] = []
    for text in asked.search:
        try:
            values = values_of(text, kinds)
            if values.name in [one.name for one in found]:
                raise ValueError(f"{values.name} is there twice")
            found.append(values)
        except ValueError as error:
            problems.append(
                Problem(
                    what="a setting cannot be searched",
                    got=f"--search {text}",
                    why=str(error),
                    fix="write --search learning_rate=1e-5:1e-3:log for a range, --search num_train_epochs=2,4 for a "
                    "choice",
                )
            )
    return found, problems


def searched_problems(asked: TuneArguments, job: Any, args: TrainingArguments, task: Any) -> list[Problem]:
    """Return what is wrong with the search: its words, and values that the training would refuse."""
    found, problems = _parsed(asked, job, args)
    known = {one.what for one in [*broken_rules(job), *broken_rules(args), *task.problems(job, args)]}
    for values in found:
        for value in values.ends():
            problems += [one for one in _refused(values.name, value, job, args, task) if one.what not in known]
    if args.eval_strategy == "no" or not args.do_eval:
        problems.append(
            Problem(
                what="trials are not evaluated",
                got=f"eval_strategy={args.eval_strategy}, do_eval={args.do_eval}",
                why="they are compared by their evaluations, and those that fall behind are dropped",
                fix="leave --eval_strategy and --do_eval out: whet tune evaluates after every epoch",
            )
        )
    for name in ("auto", "dry_run"):
        if getattr(job, name):
            problems.append(
                Problem(
                    what=f"whet tune starts trainings, and {name} is for one",
                    got=f"--{name}",
                    why="trials have different settings, and so different speeds and sizes",
                    fix=f"leave --{name} out; use it with the command of the best settings, printed at the end",
                )
            )
    if job.seeds > 1:
        problems.append(
            Problem(
                what="whet tune trains one seed a trial",
                got=f"--seeds {job.seeds}",
                why="a search over several seeds takes so many times as long",
                fix="leave --seeds out; use it with the command of the best settings, printed at the end",
            )
        )
    return problems


def _refused(name: str, value: Any, job: Any, args: TrainingArguments, task: Any) -> Iterator[Problem]:
    """Yield why a training with this value is refused."""
    try:
        job, args = (replace(one, **{name: value}) if hasattr(one, name) else one for one in (job, args))
    except WhetError as error:
        yield from error.problems
        return
    yield from task.problems(job, args)
