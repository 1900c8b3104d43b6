"""Rules as rows: each checks settings and returns the problem, or None.

A rule sees the settings of one class, or those of a task and then those of its training. A setting counts as set if it
has neither its default nor a value that switches it off.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from whet.errors import Problem

Rule = Callable[..., Problem | None]

_SEEDS = 2**32
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "[": (operator.ge, "from {}"), "(": (operator.gt, "above {}"), "]": (operator.le, "up to {}"),
    ")": (operator.lt, "below {}"),
}  # fmt: skip


def broken_if(
    rule_name: str, names: Sequence[str], is_broken: Callable[..., Any], *, what: str, why: str, fix: str
) -> Rule:
    """Return the rule that is broken by some values of the settings `names`; the problem shows these."""

    def rule(*settings: Any) -> Problem | None:
        if not is_broken(*settings):
            return None
        values = {name: getattr(_owner(name, settings), name) for name in names}
        got = ", ".join(f"{name}={value}" for name, value in values.items()) if len(names) > 1 else values[names[0]]
        return Problem(what=what, got=got if str(got).strip() else f"no {names[0]}", why=why, fix=fix)

    return _named(rule_name, rule)


def is_given(rule_name: str, name: str, *, what: str, why: str, fix: str) -> Rule:
    """Return the rule that a text is not blank."""
    return broken_if(rule_name, (name,), lambda asked: not getattr(asked, name).strip(), what=what, why=why, fix=fix)


def excludes(
    rule_name: str, asked: str | Sequence[str], others: Sequence[str], *, why: str, fix: str | None = None
) -> Rule:
    """Return the rule that none of `others` is set next to one of `asked`.

    Each is the name of a setting, or `name=value` where this value alone counts. `fix` as in `Problem`; None: leave one
    of the two out.
    """

    def rule(*settings: Any) -> Problem | None:
        first = next((one for one in ([asked] if isinstance(asked, str) else asked) if is_set(one, *settings)), None)
        given = [one for one in others if is_set(one, *settings)]
        if first is None or not given:
            return None
        first, *names = (one.replace("=", " ") for one in (first, *given))
        return Problem(
            what=f"{first} does not go with {' and '.join(names)}",
            got={one: getattr(_owner(one, settings), one) for one in (name.partition("=")[0] for name in given)},
            why=why,
            fix=fix or f"leave {' and '.join(f'--{name}' for name in names)} out, or --{first}",
        )

    return _named(rule_name, rule)


def only_with(
    rule_name: str, asked: str, names: Sequence[str], *, why: str, fix: str, is_on: Callable[[Any], bool] | None = None
) -> Rule:
    """Return the rule that these settings have their defaults, unless `asked` is set, or `is_on` says that it is on."""

    def rule(settings: Any) -> Problem | None:
        usual = _defaults(settings)
        given = {name: value for name in names if (value := getattr(settings, name)) not in (usual[name], {})}
        if not given or (getattr(settings, asked) is not None if is_on is None else is_on(settings)):
            return None
        return Problem(what=f"{' and '.join(given)} would change nothing without {asked}", got=given, why=why, fix=fix)

    return _named(rule_name, rule)


def is_set(word: str, *settings: Any) -> bool:
    """Return whether a setting, given as in `excludes`, is set."""
    name, equals, value = word.partition("=")
    owner = _owner(name, settings)
    now = getattr(owner, name)
    return str(now) == value if equals else bool(now) and now != _defaults(owner)[name]


def _owner(name: str, settings: Sequence[Any]) -> Any:
    return next(one for one in settings if hasattr(one, name))


def _defaults(settings: Any) -> dict[str, Any]:
    return {one.name: one.default for one in fields(settings)}


def _named(rule_name: str, rule: Rule) -> Rule:
    rule.__name__ = rule_name
    return rule


def _of_value(name: str, ending: str, fits: Callable[[Any], bool], *, what: str, why: str, fix: str) -> Rule:
    """Return the rule that the value of one setting fits, if it is given."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        return None if value is None or fits(value) else Problem(what=f"{name} {what}", got=value, why=why, fix=fix)

    return _named(f"{name}_{ending}", rule)


def at_least(name: str, low: float, why: str) -> Rule:
    """Return the rule that a number is `low` or more."""
    fix = f"use --{name} {low:g} or more"
    return _of_value(name, f"at_least_{low:g}", lambda value: value >= low, what=f"is below {low:g}", why=why, fix=fix)


def at_most(name: str, high: int, why: str) -> Rule:
    """Return the rule that a number is `high` or less."""
    fix = f"use --{name} {high} or less"
    return _of_value(name, f"at_most_{high}", lambda value: value <= high, what="is too large", why=why, fix=fix)


def above(name: str, low: float, why: str) -> Rule:
    """Return the rule that a number is more than `low`."""
    fix, what = f"use a --{name} above {low:g}", f"is not above {low:g}"
    return _of_value(name, f"above_{low:g}", lambda value: value > low, what=what, why=why, fix=fix)


def within(name: str, interval: str, why: str, example: float) -> Rule:
    """Return the rule that a number lies in an interval: "[0, 1)" has 0, and not 1."""
    low, high = (float(text) for text in interval[1:-1].split(","))
    (reaches, begins), (stays, ends) = _LIMITS[interval[0]], _LIMITS[interval[-1]]
    words = f"{begins.format(f'{low:g}')}, {ends.format(f'{high:g}')}"
    return _of_value(
        name,
        "within",
        lambda value: reaches(value, low) and stays(value, high),
        what=f"is not {words}",
        why=why,
        fix=f"use a --{name} {words}, such as {example:g}",
    )


def seed(name: str) -> Rule:
    """Return the rule that a seed is valid for every random generator."""
    why, fix = "numpy's generators, the narrowest, take seeds of 32 bits", f"use a --{name} from 0 to {_SEEDS - 1}"
    return _of_value(name, "is_a_seed", lambda value: 0 <= value < _SEEDS, what="is not a valid seed", why=why, fix=fix)


def is_text(name: str) -> Rule:
    """Return the rule that a text, or each of several, holds complete characters: tokenizers take no others."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        texts = [value] if isinstance(value, str) else value or ()
        odd = next((text for text in texts if any("\ud800" <= char <= "\udfff" for char in text)), None)
        if odd is None:
            return None
        return Problem(
            what=f"{name} is not UTF-8",
            got=ascii(odd)[:200],
            why="a byte of another encoding, or half of a surrogate pair, is no character",
            fix=f"write --{name} in UTF-8",
        )

    return _named(f"{name}_is_text", rule)


def whole_or_share(name: str, strategy: str) -> Rule:
    """Return the rule for an interval: a whole number of steps, or below 1 a share of the run."""

    def rule(args: Any) -> Problem | None:
        value = getattr(args, name)
        if getattr(args, strategy) != "steps" or 0 < value < 1 or (value >= 1 and value == int(value)):
            return None
        return Problem(
            what=f"{name} is not an interval",
            got=value,
            why="an interval is a whole number of optimizer steps, or a share of the run between 0 and 1",
            fix=f"use --{name} 100, or --{name} 0.1 for every tenth of the run, or --{strategy} no",
        )

    return _named(f"{name}_whole_or_share", rule)
