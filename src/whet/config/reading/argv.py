"""Command line words -> named texts. What the names mean is for others to say."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.config.reading.values import is_bool_word, is_many, is_switch
from whet.errors import Problem

_ALONE = ("help", "print_config")
"""Flags of the command itself, which take no value."""
_BARE = {"resume_from_checkpoint": "auto"}
"""Options that take a value, and mean this one where none follows."""


@dataclass
class Words:
    """A command line, taken apart."""

    flags: dict[str, object] = field(default_factory=dict)
    """Name -> text; a list of texts where the name takes several. Of a flag given again the last value holds."""
    config_files: list[str] = field(default_factory=list)
    wants: set[str] = field(default_factory=set)
    """`help` and `print_config`, where they were asked for."""
    problems: list[Problem] = field(default_factory=list)


def split(argv: Sequence[str], kind_of: Callable[[str], Any], lone: str | None = None) -> Words:
    """Return the words sorted by name. A word without a name is the value of `lone`: `config`, or an option.

    `kind_of` gives the annotation of a name, None for an unknown one. `--a-name`, `--a_name value` and `--a_name=value`
    are all read; the bare `--name` of a switch means true, and its `--no_name` false.
    """
    words = Words()
    for name, text in _pairs(argv, kind_of):
        if name in _ALONE and text is None:
            words.wants.add(name)
        elif text is None:
            words.problems.append(_no_value(str(name)))
        elif name is None and (lone is None or lone in words.flags):
            words.problems.append(_stray(text))
        else:
            _put(words, name or str(lone), text, kind_of)
    return words


def _pairs(argv: Sequence[str], kind_of: Callable[[str], Any]) -> Iterator[tuple[str | None, str | None]]:
    """Yield each (name, text): a lone word has no name, a flag without a value has no text."""
    at = 0
    while at < len(argv):
        word, after = argv[at], argv[at + 1] if at + 1 < len(argv) else None
        at += 1
        if not _is_flag(word):
            yield None, word
            continue
        name, equals, text = word.lstrip("-").partition("=")
        name = {"h": "help"}.get(name, name.replace("-", "_"))
        if equals or name in _ALONE:
            yield name, text if equals else None
            continue
        name, bare = _switch(name, kind_of)
        takes_next = after is not None and _is_value(after, bare)
        yield name, after if takes_next else bare
        at += takes_next


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1].isalpha())


def _switch(name: str, kind_of: Callable[[str], Any]) -> tuple[str, str | None]:
    """Return the option's name, and what its bare flag means: None where the flag needs a value."""
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
        words.flags[name] = text


def _no_value(name: str) -> Problem:
    return Problem(
        what=f"--{name} has no value",
        got=f"--{name}",
        why="only flags that mean true or false may stand alone",
        fix=f"write --{name} VALUE, or --{name}=VALUE where the value begins with two dashes",
    )


def _stray(text: str) -> Problem:
    return Problem(
        what="a word belongs to no flag",
        got=text,
        why="a flag takes one value, and this command takes no further word",
        fix=f"put its --flag before it; join a value of several words by quotes: --flag '... {text}'",
    )
