"""Command line words -> named texts. This module does not interpret the names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from whet.config.reading.files import SUFFIXES
from whet.config.reading.values import is_bool_word, is_many, is_switch
from whet.errors import Problem

_ALONE = ("help", "print_config")
"""Flags of the command itself, which take no value."""
STRAY = "a word belongs to no flag"
_BARE = {"resume_from_checkpoint": "auto"}
"""Options that take a value, with the value that they mean without one."""


@dataclass
class Words:
    """A parsed command line."""

    flags: dict[str, object] = field(default_factory=dict)
    """Name -> text; a list of texts if the name takes several. The last value of a repeated flag counts."""
    config_files: list[str] = field(default_factory=list)
    wants: set[str] = field(default_factory=set)
    """`help` and `print_config`, if they were given."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """A sentence for each value that counts for nothing, because its flag was repeated with another one."""


def split(
    argv: Sequence[str], kind_of: Callable[[str], Any], lone: str | None = None, second: str | None = None
) -> Words:
    """Return the words by name. A word without a name is the value of `lone`: `config`, or an option.

    A second word without a name is the value of the option `second`.

    `kind_of` gives the annotation of a name, None for an unknown one. `--a-name`, `--a_name value` and `--a_name=value`
    are all read; the bare `--name` of a switch means true, and its `--no_name` false.
    """
    words = Words()
    if argv[:1] == ["help"]:
        words.wants.add("help")
        argv = argv[1:]
    first = lone
    for name, text, switch in _pairs(argv, kind_of):
        lone = second if second is not None and first in words.flags else first
        if name in _ALONE and text is None:
            words.wants.add(name)
        elif text is None:
            words.problems.append(_no_value(str(name)))
        elif name is None and (problem := _wrong_lone(text, switch, lone, words)):
            words.problems.append(problem)
        else:
            _put(words, name or str(lone), text, kind_of)
    return words


class _Pair(NamedTuple):
    name: str | None
    """None for a lone word."""
    text: str | None
    """None for a flag without a value."""
    switch: str | None = None
    """For a lone word: the flag before it, as written, if that is a switch without a value."""


def _pairs(argv: Sequence[str], kind_of: Callable[[str], Any]) -> Iterator[_Pair]:
    at, switch = 0, None
    while at < len(argv):
        word, after = argv[at], argv[at + 1] if at + 1 < len(argv) else None
        at += 1
        if not _is_flag(word):
            yield _Pair(None, word, switch)
            switch = None
            continue
        name, equals, text = word.lstrip("-").partition("=")
        name, switch = {"h": "help"}.get(name, name.replace("-", "_")), None
        if equals or name in _ALONE:
            yield _Pair(name, text if equals else None)
            continue
        name, bare = _switch(name, kind_of)
        takes_next = after is not None and _is_value(after, bare)
        yield _Pair(name, after if takes_next else bare)
        at += takes_next
        switch = word if bare in ("true", "false") and not takes_next else None


def _wrong_lone(text: str, switch: str | None, lone: str | None, words: Words) -> Problem | None:
    """Return the problem of a word without a flag, None if it is the value of `lone`."""
    if lone == "config":
        fits = Path(text).suffix.lower() in SUFFIXES
    else:
        fits = lone is not None and (switch is None or "/" in text or Path(text).exists())
    if switch is not None and not fits:
        return _no_bool(switch, text)
    return None if fits and lone not in words.flags else _stray(text, lone)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1].isalpha())


def _switch(name: str, kind_of: Callable[[str], Any]) -> tuple[str, str | None]:
    """Return the option's name, and the meaning of its bare flag: None if the flag needs a value."""
    if kind_of(name) is None and name.startswith("no_") and is_switch(kind_of(name[3:])):
        return name[3:], "false"
    if kind_of(name) is None:
        return name, ""  # so that an unknown flag is reported as unknown, and not for its lack of a value
    return name, "true" if is_switch(kind_of(name)) else _BARE.get(name)


def _is_value(word: str, bare: str | None) -> bool:
    """Return whether the word after a flag is its value; a switch takes only true and false: a file may follow."""
    if bare == "true":
        return is_bool_word(word) or word == "null"
    return bare != "false" and not word.startswith("--")


def _put(words: Words, name: str, text: str, kind_of: Callable[[str], Any]) -> None:
    if name == "config":
        words.config_files.append(text)
    elif is_many(kind_of(name)):
        earlier = words.flags.get(name)
        words.flags[name] = [*(earlier if isinstance(earlier, list) else []), text]
    else:
        if words.flags.get(name, text) != text:  # the note shows no value: it may be a secret
            words.notes.append(f"--{name} is given more than once: only its last value counts")
        words.flags[name] = text


def _no_value(name: str) -> Problem:
    return Problem(
        what=f"--{name} has no value",
        got=f"--{name}",
        why="only flags that mean true or false may stand alone",
        fix=f"write --{name} VALUE, or --{name}=VALUE if the value begins with two dashes",
    )


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
