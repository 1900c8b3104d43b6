"""Settings classes: frozen dataclasses that check their values and report all problems at once."""

import ast
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from whet.config import optimizer_names
from whet.config.aliases import Alias, Refused, is_off
from whet.config.values import expected, read
from whet.errors import MASK, ConfigError, Problem, hide_secrets

Settings = TypeVar("Settings")

_log = logging.getLogger("whet.config")
_LISTINGS: Mapping[str, Callable[[], str]] = {"optimizers": optimizer_names.listing}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a settings class declares besides its fields."""

    headings: Mapping[str, str] = field(default_factory=dict)
    """First field under each heading of the help text -> the heading."""
    rules: tuple[Callable[[Any], Problem | None], ...] = ()
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Returns values for fields that are not given, from those that are."""
    resolve: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Resolves values: fills in fields whose default follows from other fields."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    """Names that are known but not honoured."""
    notes: Callable[[Any], Sequence[str]] = lambda _: ()
    """Remarks about settings that break no rule."""
    build: Callable[..., None]
    """The dataclass's own __init__, which checks nothing."""

    def below(self, base: "Spec") -> "Spec":
        """Return this specification of a class that inherits from the class of `base`."""
        return replace(
            self,
            headings={**base.headings, **self.headings},
            rules=(*base.rules, *self.rules),
            aliases={**base.aliases, **self.aliases},
            refused={**base.refused, **self.refused},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One field, as the command line and the help text see it."""

    name: str
    kind: Any
    """Type of the field: its annotation, or the `kind` of its metadata if the annotation accepts more spellings."""
    default: Any
    heading: str
    required: bool
    secret: bool

    def shown(self, value: object) -> object:
        """Return the value as it may be printed."""
        if self.secret and value is not None:
            return MASK
        return hide_secrets(value) if isinstance(value, str) else value


def spec_of(cls: type) -> Spec:
    """Return what the `checked` decorator stored about the class."""
    assert "__whet_spec__" in vars(cls), f"{cls.__name__} has no @checked of its own"
    return cls.__whet_spec__  # type: ignore[attr-defined]


@cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the options of a settings class by name, in the order of its fields."""
    found: dict[str, Option] = {}
    heading = ""
    for one in fields(cls):
        heading = spec_of(cls).headings.get(one.name, heading)
        found[one.name] = Option(
            name=one.name,
            kind=one.metadata.get("kind", one.type),
            default=one.default_factory() if one.default_factory is not MISSING else one.default,
            heading=heading,
            required=one.metadata.get("required", False),
            secret=one.metadata.get("secret", False),
        )
    return found


def help_texts(cls: type) -> dict[str, str]:
    """Return the text under each field, on one line, from the source of the class; empty without source.

    A field whose metadata has a `listing` continues with the names of a registry.
    """
    texts: dict[str, str] = {}
    for declaring in (base for base in cls.__mro__ if inspect.get_annotations(base)):
        texts = _texts_in(declaring) | texts
    listings = {one.name: _LISTINGS[one.metadata["listing"]] for one in fields(cls) if "listing" in one.metadata}
    return texts | {name: f"{texts[name]} {listing()}" for name, listing in listings.items() if name in texts}


def _texts_in(cls: type) -> dict[str, str]:
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except OSError:
        return {}
    body = next(n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return {
        ast.unparse(declared.target): " ".join(str(after.value.value).split())
        for declared, after in pairwise(body)
        if isinstance(declared, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def printable(settings: object) -> dict[str, Any]:
    """Return the settings' values by name, ready for JSON and YAML, secrets masked."""
    values = {
        option.name: option.shown(getattr(settings, option.name)) for option in options_of(type(settings)).values()
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_USUAL_NAMES = {
    **dict.fromkeys(("batch_size", "bs", "train_batch_size"), "per_device_train_batch_size"),
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "num_train_epochs"),
    **dict.fromkeys(("max_length", "max_len", "seq_length"), "max_seq_length"),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("output", "out", "out_dir"), "output_dir"),
    "model_name": "model_name_or_path",
    "resume": "resume_from_checkpoint",
}
"""Names of options in other programs that are spelled differently: suggested, not accepted."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of some settings classes, and how messages show them."""

    options: Mapping[str, Option]
    aliases: Mapping[str, Alias]
    refused: Mapping[str, Refused]
    say: Callable[[str], str] = str
    """Formats a name: `--seed` on a command line."""
    where: str = ""
    """The source of the names if it is not the command line: ` in run.yaml`."""
    also: Sequence[str] = ()
    """Names of the command itself; used only to guess a misspelled name."""

    @classmethod
    def of(cls, parts: Sequence[type], **how: Any) -> "Names":
        """Return the names of the settings classes `parts` together; `how` sets say, where and also."""
        return cls(
            options={name: option for part in parts for name, option in options_of(part).items()},
            aliases={name: alias for part in parts for name, alias in spec_of(part).aliases.items()},
            refused={name: one for part in parts for name, one in spec_of(part).refused.items()},
            **how,
        )

    def kind(self, name: str) -> Any:
        """Return the type of the name's value; None for an unknown name."""
        known = self.options.get(name) or self.aliases.get(name)
        return known.kind if known else None


@dataclass
class Taken:
    """The result of reading given names: values, problems and notes."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given_as: dict[str, str] = field(default_factory=dict)
    """Field -> the name under which it was given first."""


def take(given: Mapping[str, object], names: Names, reader: Callable[[object, Any], Any] = read) -> Taken:
    """Return the values of the fields that are given here, each read by `reader(value, annotation)`."""
    taken = Taken()
    for name, value in given.items():
        if names.kind(name) is None:
            off = names.refused[name].off if name in names.refused else ()
            taken.problems += [] if is_off(value, off, reader) else [_unknown(name, names)]
            continue
        try:
            _put(taken, name, reader(value, names.kind(name)), names)
        except (ValueError, OverflowError):
            taken.problems.append(_wrong_type(name, value, names))
    return taken


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to this one; None if none is similar."""
    return next(iter(get_close_matches(name, known, n=1)), None)


def _put(taken: Taken, name: str, value: Any, names: Names) -> None:
    field_name = name
    if alias := names.aliases.get(name):
        if value in alias.unset:
            return
        field_name, value = alias.to, alias.convert(value)
        taken.notes += [_note(name, alias, value, names)] if alias.speaks(value) else []
    if field_name is None:
        return
    first = taken.given_as.setdefault(field_name, name)
    if taken.values.setdefault(field_name, value) != value:
        taken.problems.append(_two_values((first, name), (taken.values[field_name], value), field_name, names))


def _note(name: str, alias: Alias, value: object, names: Names) -> str:
    said = names.say(name) + names.where
    if alias.to is None:
        return f"{said} has no effect: {alias.note}"
    return f"{said} is {alias.name} of {names.say(alias.to)}, and was taken as {_written(value)}"


def _unknown(name: str, names: Names) -> Problem:
    said = names.say(name)
    if name in names.refused:
        return Problem(
            what=f"whet does not honour {said}{names.where}",
            got=name,
            why="transformers, one of its scripts or an earlier whet knows it; whet does not carry it out, and never "
            "ignores a setting",
            fix=f"leave {said} out" + (f"; {names.refused[name].instead}" if names.refused[name].instead else ""),
        )
    meant = _USUAL_NAMES.get(name.lower())
    like = meant if meant in names.options else nearest(name, [*names.options, *names.aliases, *names.also])
    return Problem(
        what=f"{said}{names.where} is unknown",
        got=name,
        why="no option has this name, and a setting without effect would mislead",
        fix=f"did you mean {names.say(like)}?" if like else f"leave {said} out; --help all lists every option",
    )


def _wrong_type(name: str, value: object, names: Names) -> Problem:
    option = names.options.get(name)
    wants = expected(names.kind(name))
    usual = f", such as {_written(option.default)}" if option and option.default not in (None, "", ()) else ""
    return Problem(
        what=f"{names.say(name)}{names.where} does not fit",
        got=option.shown(value) if option else value,
        why=f"{name} takes {wants}",
        fix=f"give {names.say(name)} {wants}{usual}",
    )


def _two_values(given_as: tuple[str, str], values: tuple[object, object], field_name: str, names: Names) -> Problem:
    return Problem(
        what=f"{names.say(given_as[0])} and {names.say(given_as[1])}{names.where} contradict each other",
        got=", ".join(f"{name}: {_written(value)}" for name, value in zip(given_as, values, strict=True)),
        why=f"both set {field_name}",
        fix=f"keep only {names.say(field_name)}",
    )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked(**spec: Any) -> Callable[[type[Settings]], type[Settings]]:
    """Return a decorator that puts checks before a dataclass's __init__; its keywords are the fields of `Spec`.

    A checked class accepts older names too, refuses unknown ones, converts each value by its annotation, and applies
    the rules. One ConfigError reports all problems. Translations of older names are logged as warnings. Below another
    checked class, it has that one's headings, rules and names too.
    """

    def decorate(cls: type[Settings]) -> type[Settings]:
        own = Spec(build=cls.__init__, **spec)
        bases = [spec_of(one) for one in cls.__mro__[1:] if "__whet_spec__" in vars(one)]
        cls.__whet_spec__ = own.below(bases[0]) if bases else own  # type: ignore[attr-defined]
        cls.__init__ = _checking_init(cls)
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
    """Return every problem that the rules of its class find in this instance, and its secrets that are masks."""
    return [*broken(spec_of(type(settings)).rules, settings), *_masked(settings)]


def _masked(settings: object) -> list[Problem]:
    return [
        Problem(
            what=f"the {option.name} is masked",
            got=MASK,
            why="--print_config prints this in place of a token, so that none ends up in a file",
            fix=f"take {option.name} out of the config file and set HF_TOKEN, or give --{option.name}",
        )
        for option in options_of(type(settings)).values()
        if option.secret and getattr(settings, option.name) == MASK
    ]


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
        if len(placed) > len(by_place) or not given.keys().isdisjoint(by_place[: len(placed)]):
            raise TypeError(f"{type(self).__name__} takes {', '.join(by_place) or 'nothing'} without a name, and once")
        taken = take(dict(zip(by_place, placed, strict=False)) | given, Names.of([type(self)]))
        for note in taken.notes if not taken.problems else ():
            _log.warning("%s", note)
        spec.build(self, **_complete(type(self), taken.values))
        refuse([*taken.problems, *broken_rules(self)])
        for note in notes(self):
            _log.warning("%s", note)

    return __init__
