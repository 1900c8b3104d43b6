"""Settings classes: frozen dataclasses that check their values and report all problems at once."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from whet.config.options import Spec, options_of, spec_of
from whet.config.reading.given import Names, take
from whet.errors import ConfigError, Problem

Settings = TypeVar("Settings")

_log = logging.getLogger("whet.config")


class FrozenSettingsError(ConfigError, FrozenInstanceError):
    """An attempt to change a settings object; also an AttributeError, as with any frozen dataclass."""


def checked(**spec: Any) -> Callable[[type[Settings]], type[Settings]]:
    """Return a decorator that puts checks before a dataclass's __init__; its keywords are the fields of `Spec`.

    A checked class accepts older names too, refuses unknown ones, converts each value by its annotation, and applies
    the rules. One ConfigError reports all problems. Translations of older names are logged as warnings.
    """

    def decorate(cls: type[Settings]) -> type[Settings]:
        cls.__whet_spec__ = Spec(build=cls.__init__, **spec)  # type: ignore[attr-defined]
        cls.__init__ = _checking_init(cls)
        cls.__setattr__, cls.__delattr__ = _frozen(cls), _frozen(cls)
        return cls

    return decorate


def draft(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return an instance with these values and defaults for the others, without applying the rules."""
    made = object.__new__(cls)
    spec_of(cls).build(made, **_complete(cls, values))
    return made


def _complete(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for every field: those that are given, and what follows from them and the defaults for others."""
    spec = spec_of(cls)
    defaults = {option.name: option.default for option in options_of(cls).values()}
    return spec.resolve({**defaults, **spec.usual(given), **given})


def broken_rules(settings: object) -> list[Problem]:
    """Return every problem that the rules of its class find in this instance."""
    return broken(spec_of(type(settings)).rules, settings)


def broken(rules: Sequence[Callable[..., Problem | None]], *settings: object) -> list[Problem]:
    """Return the problems that these rules find."""
    return [problem for rule in rules if (problem := rule(*settings)) is not None]


def notes(settings: object) -> list[str]:
    """Return the remarks of its class about this instance; they are not problems."""
    return list(spec_of(type(settings)).notes(settings))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError for all problems, if there is any."""
    if problems:
        raise ConfigError.of(problems)


def _checking_init(cls: type) -> Callable[..., None]:
    spec = spec_of(cls)

    by_place = [one.name for one in fields(cls) if not one.kw_only]

    @functools.wraps(spec.build)
    def __init__(self: Any, *placed: Any, **given: Any) -> None:  # noqa: N807
        refuse(_misplaced(type(self).__name__, placed, by_place, given))
        taken = take(dict(zip(by_place, placed, strict=False)) | given, Names.of([type(self)]))
        for note in taken.notes if not taken.problems else ():
            _log.warning("%s", note)
        spec.build(self, **_complete(type(self), taken.values))
        refuse([*taken.problems, *broken_rules(self)])
        for note in notes(self):
            _log.warning("%s", note)

    return __init__


def _misplaced(name: str, placed: Sequence[Any], by_place: Sequence[str], given: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of values that were given without a name."""
    if len(placed) > len(by_place):
        problem = Problem(
            what=f"{name} takes {' and '.join(by_place) or 'nothing'} without a name",
            got=f"{len(placed)} values without names",
            why="the order of so many fields may change",
            fix=f"name the others: {name}({', '.join([*by_place, 'seed=1'])})",
        )
        return [problem]
    return [
        Problem(
            what=f"{field_name} is given twice",
            got=f"{value!r} and {field_name}={given[field_name]!r}",
            why="the first value without a name is the same field",
            fix=f"keep only {field_name}={given[field_name]!r}",
        )
        for field_name, value in zip(by_place, placed, strict=False)
        if field_name in given
    ]


def _frozen(cls: type) -> Callable[..., None]:
    def refuse_change(self: object, field_name: str, *value: object) -> None:
        shown = repr(value[0]) if value else "..."
        raise FrozenSettingsError(
            what=f"{field_name} cannot be changed: these {cls.__name__} are final",
            got=f"args.{field_name} = {shown}" if value else f"del args.{field_name}",
            why="settings are checked once, when they are made, and a run can rely on them from then on",
            fix=f"make new ones: args = dataclasses.replace(args, {field_name}={shown}), and a new Trainer with them"
            if field_name in options_of(cls)
            else f"keep {field_name} in a variable of your own: it is no setting of whet",
        )

    return refuse_change
