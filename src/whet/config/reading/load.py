"""Conversion of a command line to settings: defaults, then config files, then flags; all problems at once."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whet.config.command import Command
from whet.config.names.off_values import kind_of
from whet.config.options import options_of, printable
from whet.config.reading.argv import STRAY, Words, split
from whet.config.reading.files import read_config
from whet.config.reading.given import Names, Taken, take
from whet.config.reading.help import render
from whet.config.reading.values import read_flag
from whet.config.secrets import hidden
from whet.config.settings import broken_rules, draft, notes, refuse
from whet.errors import ConfigError, Problem


@dataclass(frozen=True)
class Loaded:
    """The result of a command line: settings to run with, or a text to print instead."""

    settings: tuple[Any, ...] = ()
    """One instance of each of the command's settings classes."""
    text: str | None = None
    notes: list[str] = field(default_factory=list)
    """Notes about older names and settings without effect."""


def load(command: Command, argv: Sequence[str]) -> Loaded:
    """Return the settings for the words after the command's name; raises ConfigError with every problem found."""
    argv, rest = _rest(argv, command)
    words = split(argv, partial(_kind, Names.of(command.parts)), command.lone, command.second_lone)
    if command.rest is not None and not rest and any(problem.what == STRAY for problem in words.problems):
        raise _without_dashes(command, argv)
    if "help" in words.wants:
        return Loaded(text=render(command))
    taken = _take_all(words, command)
    values = {**taken.values, **command.usual(taken.values), **rest}
    drafts = [draft(part, _share(values, part)) for part in command.parts]
    said = [*taken.notes, *(note for one in drafts for note in notes(one))]
    if "print_config" in words.wants:
        usual = {problem.what for problem in _broken([draft(part, {}) for part in command.parts], command)}
        refuse([*taken.problems, *(one for one in _broken(drafts, command) if one.what not in usual)])
        return Loaded(text=as_yaml(drafts), notes=said)
    found = [*taken.problems, *_broken(drafts, command)]
    refuse([*found, *command.places(*drafts)] if found else [])
    return Loaded(settings=tuple(drafts), notes=said)


def _rest(argv: Sequence[str], command: Command) -> tuple[Sequence[str], dict[str, tuple[str, ...]]]:
    """Return the words before `--`, and those after it as the setting that takes them."""
    if command.rest is None or "--" not in argv:
        return argv, {}
    end = list(argv).index("--")
    return argv[:end], {command.rest: tuple(argv[end + 1 :])}


def _without_dashes(command: Command, argv: Sequence[str]) -> ConfigError:
    """Return the error for words that were meant for the command after `--`."""
    return ConfigError(
        what=f"{command.name} takes its command after --",
        got=shlex.join([*command.name.split(), *hidden(argv)[0]]),
        why="without the two dashes its own options and those of the command would be mixed up",
        fix=f"put them before the command: {command.name} [--OPTION VALUE ...] -- COMMAND ...",
    )


def as_yaml(settings: Sequence[object]) -> str:
    """Return the settings as the text of a config file, under the headings of the help text."""
    import yaml

    lines: list[str] = []
    for one in settings:
        values = printable(one)
        for option in options_of(type(one)).values():
            heading = f"# {option.heading}"
            lines += [] if heading in lines else [heading]
            lines.append(yaml.safe_dump({option.name: values[option.name]}, width=10**6).strip())
    return "\n".join(lines)


def _broken(drafts: Sequence[Any], command: Command) -> list[Problem]:
    return [*(problem for one in drafts for problem in broken_rules(one)), *command.check(*drafts)]


def _kind(names: Names, name: str) -> Any:
    return str if name == "config" else names.kind(name) or kind_of(names.off.get(name, ()))


def _take_all(words: Words, command: Command) -> Taken:
    """Return the values of all sources, a later one over an earlier one."""
    names = partial(Names.of, command.parts, also=command.own_flags)
    total = Taken(problems=list(words.problems), notes=list(words.notes))
    for path in words.config_files if command.takes_config else []:
        try:
            given = read_config(path)
        except ConfigError as error:
            total.problems += error.problems
            continue
        _add(total, take(given, names(where=f" in {path}")))
    flags = words.flags if command.takes_config else words.flags | _not_taken(words)
    _add(total, take(flags, names(say="--{}".format), read_flag))
    return total


def _not_taken(words: Words) -> dict[str, object]:
    """Return the flags about config files, for a command that has none: they are unknown to it."""
    names = [*words.wants, *(["config"] if words.config_files else [])]
    return dict.fromkeys(names, "")


def _add(total: Taken, taken: Taken) -> None:
    total.values |= taken.values
    total.notes += taken.notes
    total.problems += taken.problems


def _share(values: dict[str, Any], part: type) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in options_of(part)}
