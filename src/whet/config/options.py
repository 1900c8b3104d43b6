"""The options of a settings class: types, defaults, headings and help texts."""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any

from whet.config import optimizer_names
from whet.config.names.aliases import Alias
from whet.errors import MASK, Problem, hide_secrets

_LISTINGS: Mapping[str, Callable[[], str]] = {"optimizers": optimizer_names.listing}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a settings class declares besides its fields."""

    headings: Mapping[str, str]
    """First field under each heading of the help text -> the heading."""
    rules: tuple[Callable[[Any], Problem | None], ...] = ()
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Returns values for fields that are not given, from those that are."""
    resolve: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Resolves values: fills in fields whose default follows from other fields."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Names that are known but not honoured -> what to do instead, or "" if there is no advice."""
    off: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Refused names -> the values that have no effect, and are accepted."""
    notes: Callable[[Any], Sequence[str]] = lambda _: ()
    """Remarks about settings that break no rule."""
    build: Callable[..., None]
    """The dataclass's own __init__, which checks nothing."""


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
    for declaring in (base for base in cls.__mro__ if "__annotations__" in vars(base)):
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
