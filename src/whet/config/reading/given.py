"""Conversion of given names and values to fields; old names, misspelled names and wrong types are reported at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from whet.config.names.aliases import Alias
from whet.config.names.off_values import is_off
from whet.config.options import Option, options_of, spec_of
from whet.config.reading.values import expected, read
from whet.errors import Problem

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
    refused: Mapping[str, str]
    off: Mapping[str, tuple[object, ...]]
    """Refused names -> the values with which they are accepted."""
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
            refused={name: hint for part in parts for name, hint in spec_of(part).refused.items()},
            off={name: values for part in parts for name, values in spec_of(part).off.items()},
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
            taken.problems += [] if is_off(value, names.off.get(name, ()), reader) else [_unknown(name, names)]
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
            fix=f"leave {said} out" + (f"; {names.refused[name]}" if names.refused[name] else ""),
        )
    meant = _USUAL_NAMES.get(name.lower())
    like = meant if meant in names.options else nearest(name, [*names.options, *names.aliases, *names.also])
    return Problem(
        what=f"{said}{names.where} is unknown",
        got=name,
        why="no option has this name, and a setting without effect would mislead",
        fix=f"did you mean {names.say(like)}?" if like else f"leave {said} out; --help lists every option",
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
