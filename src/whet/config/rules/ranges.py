"""Rules made from the names of settings: each checks settings and returns the problem, or None."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from whet.errors import Problem

Rule = Callable[..., Problem | None]

_SEEDS = 2**32


def only_with(
    rule_name: str, asked: str, names: Sequence[str], *, why: str, fix: str, is_on: Callable[[Any], bool] | None = None
) -> Rule:
    """Return the rule that these settings have their defaults, unless `asked` is set, or `is_on` says that it is on."""

    def rule(settings: Any) -> Problem | None:
        usual = {one.name: one.default for one in fields(settings) if one.name in names}
        given = {name: value for name in names if (value := getattr(settings, name)) != usual[name]}
        if not given or (getattr(settings, asked) is not None if is_on is None else is_on(settings)):
            return None
        return Problem(
            what=f"{' and '.join(given)} would change nothing without {asked}",
            got=given,
            why=why,
            fix=fix,
        )

    rule.__name__ = rule_name
    return rule


def broken_if(
    rule_name: str, names: Sequence[str], is_broken: Callable[[Any], bool], *, what: str, why: str, fix: str
) -> Rule:
    """Return the rule that is broken by some values of the settings `names`; the problem shows these."""

    def rule(settings: Any) -> Problem | None:
        if not is_broken(settings):
            return None
        values = {name: getattr(settings, name) for name in names}
        got = ", ".join(f"{name}={value}" for name, value in values.items()) if len(names) > 1 else values[names[0]]
        return Problem(what=what, got=got, why=why, fix=fix)

    rule.__name__ = rule_name
    return rule


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

    rule.__name__ = f"{name}_is_text"
    return rule


def at_least(name: str, low: float, why: str) -> Rule:
    """Return the rule that a number, if it is given, is `low` or more."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        if value is None or value >= low:
            return None
        return Problem(what=f"{name} is below {low:g}", got=value, why=why, fix=f"use --{name} {low:g} or more")

    rule.__name__ = f"{name}_at_least_{low:g}"
    return rule


def above(name: str, low: float, why: str) -> Rule:
    """Return the rule that a number is more than `low`."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        if value > low:
            return None
        return Problem(what=f"{name} is not above {low:g}", got=value, why=why, fix=f"use a --{name} above {low:g}")

    rule.__name__ = f"{name}_above_{low:g}"
    return rule


def seed(name: str) -> Rule:
    """Return the rule that a seed, if it is given, is valid for every random generator."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        if value is None or 0 <= value < _SEEDS:
            return None
        return Problem(
            what=f"{name} is not a valid seed",
            got=value,
            why="numpy's generators, the narrowest, take seeds of 32 bits",
            fix=f"use a --{name} from 0 to {_SEEDS - 1}",
        )

    rule.__name__ = f"{name}_is_a_seed"
    return rule


def below_one(name: str) -> Rule:
    """Return the rule that a decay rate lies in [0, 1)."""

    def rule(args: Any) -> Problem | None:
        value = getattr(args, name)
        if 0 <= value < 1:
            return None
        return Problem(
            what=f"{name} is outside 0 to 1",
            got=value,
            why="it is the share of a running mean that each step keeps; at 1 the mean would never move",
            fix=f"use a --{name} from 0 up to, but not including, 1",
        )

    rule.__name__ = f"{name}_below_one"
    return rule


def share(name: str, of_what: str) -> Rule:
    """Return the rule that a number is a share, 0 to 1; `of_what` completes "it is the share"."""

    def rule(settings: Any) -> Problem | None:
        value = getattr(settings, name)
        if 0 <= value <= 1:
            return None
        return Problem(
            what=f"{name} is outside 0 to 1",
            got=value,
            why=f"it is the share {of_what}",
            fix=f"use a --{name} from 0 to 1, such as 0.1",
        )

    rule.__name__ = f"{name}_is_a_share"
    return rule


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

    rule.__name__ = f"{name}_whole_or_share"
    return rule
