"""The command line: words and config files become settings, or a help text; all problems at once."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from whet.config.aliases import kind_of
from whet.config.settings import (
    Names,
    Option,
    Taken,
    broken_rules,
    draft,
    help_texts,
    notes,
    options_of,
    printable,
    refuse,
    take,
)
from whet.config.values import is_bool_word, is_many, is_switch, placeholder, read_flag
from whet.errors import ConfigError, Problem
from whet.optional import is_installed
from whet.strict_json import BadJson, parse_document


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its name, its options, its function."""

    name: str
    """As typed: `whet qa`."""
    summary: str
    """What it does, in a sentence or two."""
    usage: str
    """The arguments after the name."""
    examples: tuple[str, ...]
    """Command lines, shown at the top of the help text."""
    parts: tuple[type, ...]
    """The settings classes of its flags."""
    main: tuple[str, ...] = ()
    """The options that --help shows; --help all shows every one. Empty: they are few, and --help shows all."""
    lone: str | None = None
    """The meaning of a word without a flag: `config`, or the name of an option."""
    second_lone: str | None = None
    """The option that a second word without a flag is."""
    rest: str | None = None
    """The setting that takes the words after `--` as they are."""
    rest_needs_dashes: bool = True
    """Whether `rest` begins at `--` alone; otherwise also at the first word that is no option of two dashes."""
    takes_config: bool = False
    """Whether it reads --config files and prints --print_config."""
    check: Callable[..., list[Problem]] = lambda *_: []
    """Problems between the instances of `parts`."""
    places: Callable[..., list[Problem]] = lambda *_: []
    """Missing files, checked if there are other problems; otherwise `run` reports them."""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Defaults of this command that are computed from given values."""
    run: Callable[..., int | Callable[[], int]]
    """Does the work with one instance of each of `parts` and returns the exit code, or returns what does so."""

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Flags that are not settings."""
        return ("help", "json", "config", "print_config") if self.takes_config else ("help", "json")


@dataclass(frozen=True)
class Loaded:
    """The result of a command line: settings to run with, or a text to print instead."""

    settings: tuple[Any, ...] = ()
    """One instance of each of the command's settings classes."""
    text: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the text says, for a program."""
    notes: list[str] = field(default_factory=list)
    """Notes about older names and settings without effect."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Setting that was given -> `command line` or `settings file`."""


def load(command: Command, argv: Sequence[str]) -> Loaded:
    """Return the settings for the words after the command's name; raises ConfigError with every problem found."""
    argv, rest = _rest(argv, command)
    words = split(argv, kinds_of(command.parts), command.lone, command.second_lone)
    if command.rest is not None and not rest and any(problem.what == STRAY for problem in words.problems):
        raise _without_dashes(command, argv)
    words.problems += _wrong_json(words.flags.pop("json", "true"))
    if "help" in words.wants:
        return Loaded(text=render(command, every="help all" in words.wants), facts={"options": described(command)})
    taken, sources = _take_all(words, command)
    values = {**taken.values, **command.usual(taken.values), **rest}
    drafts = [draft(part, _share(values, part)) for part in command.parts]
    said = [*taken.notes, *(note for one in drafts for note in notes(one))]
    if "print_config" in words.wants:
        usual = {problem.what for problem in _broken([draft(part, {}) for part in command.parts], command)}
        refuse([*taken.problems, *(one for one in _broken(drafts, command) if one.what not in usual)])
        settings = {name: value for one in drafts for name, value in printable(one).items()}
        return Loaded(text=as_yaml(drafts), facts={"settings": settings}, notes=said)
    found = [*taken.problems, *_broken(drafts, command)]
    refuse([*found, *command.places(*drafts)] if found else [])
    return Loaded(settings=tuple(drafts), notes=said, sources=sources)


def own_words(argv: Sequence[str], command: Command) -> Sequence[str]:
    """Return the words that are the command's own; those after them belong to what it starts."""
    return _rest(argv, command)[0]


def _rest(argv: Sequence[str], command: Command) -> tuple[Sequence[str], dict[str, tuple[str, ...]]]:
    """Return the words before `--`, and those after it as the setting that takes them."""
    if command.rest is None:
        return argv, {}
    end = list(argv).index("--") if "--" in argv else len(argv)
    begin = end if command.rest_needs_dashes else min(end, _first_other(argv, kinds_of(command.parts)))
    rest = tuple(argv[begin + 1 :] if begin == end else argv[begin:])
    return argv[:begin], {command.rest: rest} if rest or "--" in argv else {}


def _first_other(argv: Sequence[str], kinds: Mapping[str, Any]) -> int:
    """Return the place of the first word that is neither an option of two dashes nor its value."""
    at = 0
    while at < len(argv) and (argv[at].startswith("--") or argv[at] == "-h"):
        name, equals, _ = argv[at].lstrip("-").partition("=")
        takes_next = (name.replace("-", "_") in kinds and not equals) or argv[at : at + 2] == ["--help", "all"]
        at += 2 if takes_next else 1
    return min(at, len(argv))


def _without_dashes(command: Command, argv: Sequence[str]) -> ConfigError:
    """Return the error for words that were meant for the command after `--`."""
    from whet.config.secrets import hidden

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


def kinds_of(parts: Sequence[type]) -> dict[str, Any]:
    """Return the annotation of each name that a command with these settings knows; refused names have no effect."""
    names = Names.of(parts)
    off = {name: kind for name, one in names.refused.items() if (kind := kind_of(one.off)) is not None}
    known = {name: one.kind for name, one in [*names.aliases.items(), *names.options.items()]}
    return {"config": str, **off, **known}


def _take_all(words: Words, command: Command) -> tuple[Taken, dict[str, str]]:
    """Return the values of all sources, a later one over an earlier one, and the source of each."""
    names = partial(Names.of, command.parts, also=command.own_flags)
    total = Taken(problems=list(words.problems), notes=list(words.notes))
    for path in words.config_files if command.takes_config else []:
        try:
            given = read_config(path)
        except ConfigError as error:
            total.problems += error.problems
            continue
        _add(total, take(given, names(where=f" in {path}")))
    sources = dict.fromkeys(total.values, "settings file")
    flags = words.flags if command.takes_config else words.flags | _not_taken(words)
    by_flags = take(flags, names(say="--{}".format), read_flag)
    _add(total, by_flags)
    return total, sources | dict.fromkeys(by_flags.values, "command line")


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


STRAY = "a word belongs to no flag"
_OWN = ("help", "print_config")
"""Flags of the command itself that need no value."""
_BARE = {"resume_from_checkpoint": "auto", "help": "", "print_config": ""}
"""Options that take a value, with the value that they mean without one."""


@dataclass
class Words:
    """A parsed command line."""

    flags: dict[str, object] = field(default_factory=dict)
    """Name -> text; a list of texts if the name takes several. The last value of a repeated flag counts."""
    config_files: list[str] = field(default_factory=list)
    wants: set[str] = field(default_factory=set)
    """`help`, `help all` and `print_config`, if they were given."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """A sentence for each value that counts for nothing, because its flag was repeated with another one."""


def split(argv: Sequence[str], kinds: Mapping[str, Any], lone: str | None = None, second: str | None = None) -> Words:
    """Return the words by name; `kinds` has the annotation of each known name.

    A word without a name is the value of `lone`: `config`, or an option, which takes all such words if it holds several
    values. A second one is that of the option `second`.
    `--a-name`, `--a_name value` and `--a_name=value` are all read; the bare `--name` of a switch means true, and its
    `--no_name` false.
    """
    kinds, words = {**dict.fromkeys(_OWN, str), "json": bool, **kinds}, Words()
    argv = ["--help", *argv[1:]] if argv[:1] == ["help"] else argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in kinds:
        parser.add_argument(f"--{name}", dest=name, action="append")
    found, unknown = parser.parse_known_args([*_spelled(argv, kinds, (lone, second), words.problems)])
    given: dict[str, list[str]] = vars(found)
    for word in unknown:
        name, _, text = word.removeprefix("--").partition("=")
        given.setdefault(name, []).append(text)
    for name, texts in given.items():
        if name in _OWN and texts[-1] in ("", "all"):
            words.wants |= {name, f"{name} {texts[-1]}".strip()}
        elif name == "config":
            words.config_files = texts
        elif is_many(kinds.get(name)):
            words.flags[name] = texts
        else:
            words.flags[name] = texts[-1]
            if {*texts} != {texts[-1]}:  # the note shows no value: it may be a secret
                words.notes.append(f"--{name} is given more than once: only its last value counts")
    return words


def _spelled(
    argv: Sequence[str], kinds: Mapping[str, Any], lone_names: tuple[str | None, str | None], problems: list[Problem]
) -> Iterator[str]:
    """Yield each option as --name=value, which argparse reads without guessing.

    By itself it takes the word after a switch for its value, one that begins with a dash for a flag, and the value of
    an unknown flag for a word of its own.
    """
    first, second = lone_names
    named, switch, at = set[str](), None, 0
    while at < len(argv):
        word, after = argv[at], argv[at + 1] if at + 1 < len(argv) else None
        at += 1
        if not _is_flag(word):
            name = second if second is not None and first in named else first
            problem = _wrong_lone(word, switch, name, named)
            if problem is None:
                yield f"--{name}={word}"
                named |= {str(name)} if not is_many(kinds.get(str(name))) else set()
            else:
                problems.append(problem)
            switch = None
            continue
        name, equals, text = word.lstrip("-").partition("=")
        name = {"h": "help"}.get(name, name.replace("-", "_"))
        if name not in kinds and not equals and is_switch(kinds.get(name.removeprefix("no_"))):
            yield f"--{name.removeprefix('no_')}=false"
            named.add(name.removeprefix("no_"))
            switch = word
            continue
        bare = "true" if is_switch(kinds.get(name)) else _BARE.get(name) if name in kinds else ""
        switch = None
        if not equals and after is not None and _is_value(after, name, kinds):
            text, at = after, at + 1
        elif not equals and bare is not None:
            text, switch = bare, word if bare == "true" else None
        elif not equals:
            problems.append(_no_value(name))
            continue
        yield f"--{name}={text}"
        named |= set() if is_many(kinds.get(name)) else {name}


def without(words: Sequence[str], names: Collection[str], kinds: Mapping[str, Any]) -> list[str]:
    """Return the words but for these options and their values; `kinds` as in `split`."""
    kept: list[str] = []
    option: str | None = None  # left out just before: the word may be its value
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        is_named = _is_flag(word) and name in names
        if not is_named and not (option is not None and _is_value(word, option, kinds)):
            kept.append(word)
        option = name if is_named and not equals else None
    return kept


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1].isalpha())


def _is_value(word: str, name: str, kinds: Mapping[str, Any]) -> bool:
    """Return whether the word after a flag is its value; a switch takes only true and false: a file may follow."""
    if name in _OWN:
        return name == "help" and word == "all"
    if is_switch(kinds.get(name)):
        return is_bool_word(word) or word == "null"
    return not word.startswith("--")


def _wrong_lone(text: str, switch: str | None, lone: str | None, named: Collection[str]) -> Problem | None:
    """Return the problem of a word without a flag, None if it is the value of `lone`; `switch` stands before it."""
    if lone == "config":
        return (
            None if Path(text).suffix.lower() in SUFFIXES else _no_bool(switch, text) if switch else _stray(text, lone)
        )
    if switch is not None and (lone is None or not ("/" in text or " " in text or Path(text).exists())):
        return _no_bool(switch, text)
    return _stray(text, lone) if lone is None or lone in named else None


def _no_value(name: str) -> Problem:
    return Problem(
        what=f"--{name} has no value",
        got=f"--{name}",
        why="only flags that mean true or false may stand alone",
        fix=f"write --{name} VALUE, or --{name}=VALUE if the value begins with two dashes",
    )


def _wrong_json(given: object) -> list[Problem]:
    """Return the problem of a value of --json; the command line itself has looked for the flag."""
    return [] if is_bool_word(str(given)) else [_no_bool("--json", str(given))]


def _no_bool(switch: str, text: str) -> Problem:
    name = switch.lstrip("-")
    is_off = name.replace("-", "_").startswith("no_")
    plain = name[3:] if is_off else name
    return Problem(
        what=f"--{name} takes no value" if is_off else f"--{name} takes true or false",
        got=text,
        why="the short form of false takes no value" if is_off else "no other word says whether it is on",
        fix=f"use --{plain} or --{plain} false; another word needs its own --flag",
    )


def _stray(text: str, lone: str | None) -> Problem:
    file = "; a config file ends in .yaml, .yml or .json" if lone == "config" else ""
    return Problem(
        what=STRAY,
        got=text,
        why=f"a flag takes one value, and this command takes no further word{file}",
        fix=f"put its --flag before it; join a value of several words by quotes: --flag '... {text}'",
    )


SUFFIXES = (".json", ".yaml", ".yml")
LARGEST_BYTES = 1 << 20
_READ_ON = "correct the position that is named, or use another file"


def read_config(path: str) -> dict[str, Any]:
    """Return the names and values of a config file; raises ConfigError if it is missing or damaged."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise _bad(path, f"its name does not end in {', '.join(SUFFIXES)}", "name a YAML or JSON file")
    text = _text(path)
    try:
        values = _from_json(text) if path.lower().endswith(".json") else _from_yaml(text)
    except RecursionError:
        raise _bad(path, "it is nested too deep", "write one name: value per line") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:  # from PyYAML
        raise _bad(path, str(error), _READ_ON) from None
    if not isinstance(values, dict):
        raise _bad(path, f"it holds a {type(values).__name__}, not names with values", "write one name: value per line")
    return {str(name): value for name, value in values.items()}


def _text(path: str) -> str:
    try:
        place = Path(path)
        if place.exists() and not place.is_file():
            raise _bad(path, "it is not a regular file", "name a YAML or JSON file")
        if place.stat().st_size > LARGEST_BYTES:
            raise _bad(path, f"it is larger than {LARGEST_BYTES:,} bytes", "name a file that holds options alone")
        return place.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, f"byte {error.start} is not UTF-8", "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise _bad(path, str(error), _READ_ON) from error


def _from_json(text: str) -> Any:
    try:
        return parse_document(text)
    except BadJson as problem:
        raise ValueError(problem.what) from None


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(tree, yaml.MappingNode):
            _once([str(getattr(key, "value", None)) for key, _ in tree.value])
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it contains an alias (*name); write the value of each option in place")
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its own text shows the line, which may contain a secret
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({type(error).__name__})") from None
    return {} if values is None else values


def _once(names: Sequence[str]) -> None:
    """Raise ValueError if a name is repeated, because one of its values would be lost."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"it has {', '.join(twice)} more than once")


def _bad(path: str, why: str, fix: str) -> ConfigError:
    return ConfigError(what="the config file cannot be read", got=path, why=why, fix=f"{fix} in --config")


_WIDEST = 100
"""Columns; longer lines are hard to read."""
_CONFIG_HELP = (
    ("--config FILE", "YAML or JSON file with a value for any option below. Repeat it: later files, then flags, win."),
    ("--print_config", "Print every option with its value, in the form that --config reads, and stop."),
    ("--help", "Print the options that matter most and stop; --help all prints every option."),
    ("--json", "Print one JSON object, errors too, as the only line of standard output; text goes to standard error."),
)
_SWITCHES = "An option that is true|false may stand alone: --bf16 is --bf16 true, and --no_bf16 is --bf16 false."


def render(command: Command, columns: int | None = None, *, every: bool = False) -> str:
    """Return the help text, wrapped to `columns` (default: the terminal's): of the main options, or of every one."""
    width = min(columns or shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    options = [option for part in command.parts for option in options_of(part).values() if option.name != command.rest]
    shown = [option for option in options if every or not command.main or option.name in command.main]
    lines = [*_head(command, width), *_command_part(command, width), *_option_parts(command, shown, width)]
    if len(shown) < len(options):
        lines += ["", *_wrap(f"All {len(options)} options: {command.name} --help all", width, "")]
    return "\n".join(lines)


def described(command: Command) -> list[dict[str, Any]]:
    """Return every option as data: its name, values, default, heading and help text."""
    texts = {name: text for part in command.parts for name, text in help_texts(part).items()}
    return [
        {
            "name": option.name, "values": placeholder(option.kind), "default": option.default,
            "required": option.required, "main": not command.main or option.name in command.main,
            "group": option.heading, "help": texts.get(option.name, ""),
        }
        for part in command.parts
        for option in options_of(part).values()
        if option.name != command.rest
    ]  # fmt: skip


def _head(command: Command, width: int) -> Iterator[str]:
    yield "Examples:"
    for example in command.examples:
        yield from _wrap_command(example, width)
    yield ""
    yield from _wrap(command.summary, width, "")
    yield ""
    yield from _wrap(f"Usage: {command.name} {command.usage}", width, "")


def _command_part(command: Command, width: int) -> Iterator[str]:
    yield ""
    yield "General:"
    for flag, text in _CONFIG_HELP:
        if flag.split()[0].removeprefix("--") in command.own_flags:
            yield f"  {flag}"
            yield from _wrap(text, width, " " * 6)
    yield ""
    yield from _wrap(_SWITCHES, width, "  ")


def _option_parts(command: Command, shown: Sequence[Option], width: int) -> Iterator[str]:
    texts = {name: text for part in command.parts for name, text in help_texts(part).items()}
    heading = None
    for option in shown:
        if option.heading != heading:
            heading = option.heading
            yield ""
            yield f"{heading}:"
        yield _first_line(option, width)
        yield from _wrap(texts.get(option.name, ""), width, " " * 6)


def _first_line(option: Option, width: int) -> str:
    usual = "required" if option.required else f"default: {_shown(option)}"
    line = f"  --{option.name} {placeholder(option.kind)}"
    joined = f"{line}  [{usual}]"
    return joined if len(joined) <= width else f"{_wrap_choices(line, width)}\n      [{usual}]"


def _wrap_choices(line: str, width: int) -> str:
    """Return the line broken after some of its bars where it is too long: a|b|c."""
    lines = [""]
    for choice in line.replace("|", "|\n").splitlines():
        if len(lines[-1]) + len(choice) > width and lines[-1].strip():
            lines.append(" " * 6)
        lines[-1] += choice
    return "\n".join(lines)


def _wrap_command(command: str, width: int) -> list[str]:
    """Return the command in lines that a shell joins again when they are copied."""
    parts = command.replace(" --", "\n--").splitlines()  # an option and its value stay on one line
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > width - 2:
            lines[-1] += " \\"
            lines.append(f"      {part}")
        else:
            lines[-1] += f" {part}"
    return lines


def _shown(option: Option) -> str:
    if is_many(option.kind):
        return ",".join(option.default or ()) or ("null" if option.default is None else "none")
    if option.default is None or isinstance(option.default, bool):
        return str(option.default).lower().replace("none", "null")
    return str(option.default)


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def complete(commands: Mapping[str, str], command_of: Callable[[str], Command]) -> None:
    """Write the completions that a shell asks for by argcomplete, and end the process.

    `commands`: name -> what it does; `command_of` returns the command of a name.
    """
    if not is_installed("argcomplete"):
        sys.exit(1)  # the shell has it, this environment has not: nothing is offered
    typed = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="whet", add_help=False)
    parsers = parser.add_subparsers()
    for name, text in commands.items():
        of_command = parsers.add_parser(name, help=text, add_help=False)
        if name in typed[1:2]:
            _add_completions(of_command, command_of(name))
    import_module("argcomplete").autocomplete(parser, always_complete_options=False)


def _add_completions(parser: argparse.ArgumentParser, command: Command) -> None:
    for name in command.own_flags:
        if name == "config":
            parser.add_argument("--config", action="append")
        else:
            parser.add_argument(f"--{name}", nargs="?", choices=["all"] if name == "help" else [])
    for option in (option for part in command.parts for option in options_of(part).values()):
        if option.name != command.rest:
            choices, nargs = _choices(option.kind) or None, "?" if is_switch(option.kind) else None
            parser.add_argument(f"--{option.name}", action="append", nargs=nargs, choices=choices)
    for name in filter(None, (command.lone, command.second_lone)):
        kind = next((options_of(part)[name].kind for part in command.parts if name in options_of(part)), str)
        parser.add_argument(name, nargs="*" if is_many(kind) else "?", choices=_choices(kind) or None)


def _choices(kind: Any) -> list[str]:
    """Return the words that a value may be; empty if it may be any."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice for member in get_args(kind) for choice in _choices(member)]
