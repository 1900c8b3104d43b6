"""Settings classes: frozen dataclasses that check what they are given and report every problem of it at once."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from whet.config.given import Names, take
from whet.config.options import Spec, options_of, spec_of
from whet.errors import ConfigError, Problem

Settings = TypeVar("Settings")

_log = logging.getLogger("whet.config")


def checked(**spec: Any) -> Callable[[type[Settings]], type[Settings]]:
    """Return a decorator that puts checks before a dataclass's __init__; its keywords are the fields of `Spec`.

    A checked class takes older names too, refuses unknown ones, reads each value as its annotation says, and applies
    the rules. All that is wrong comes in one ConfigError. What an older name became is logged as a warning.
    """

    def decorate(cls: type[Settings]) -> type[Settings]:
        cls.__whet_spec__ = Spec(build=cls.__init__, **spec)  # type: ignore[attr-defined]
        cls.__init__ = _checking_init(cls)
        return cls

    return decorate


def draft(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return an instance with these values and the defaults for the rest, to which no rule was applied yet."""
    defaults = {option.name: option.default for option in options_of(cls).values()}
    made = object.__new__(cls)
    spec = spec_of(cls)
    spec.build(made, **spec.settle({**defaults, **values}))
    return made


def broken_rules(settings: object) -> list[Problem]:
    """Return every problem that the rules of its class find in this instance."""
    return broken(spec_of(type(settings)).rules, settings)


def broken(rules: Sequence[Callable[..., Problem | None]], *settings: object) -> list[Problem]:
    """Return what these rules find."""
    return [problem for rule in rules if (problem := rule(*settings)) is not None]


def notes(settings: object) -> list[str]:
    """Return what its class says of this instance, beside problems."""
    return list(spec_of(type(settings)).notes(settings))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError for all problems, if there is any."""
    if problems:
        raise ConfigError.of(problems)


def _checking_init(cls: type) -> Callable[..., None]:
    spec = spec_of(cls)

    @functools.wraps(spec.build)
    def __init__(self: Any, **given: Any) -> None:  # noqa: N807
        taken = take(given, Names.of([type(self)]))
        refuse(taken.problems)
        for note in taken.notes:
            _log.warning("%s", note)
        defaults = {option.name: option.default for option in options_of(type(self)).values()}
        spec.build(self, **spec.settle({**defaults, **taken.values}))
        refuse(broken_rules(self))
        for note in notes(self):
            _log.warning("%s", note)

    return __init__
