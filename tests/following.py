"""What a user does who follows the fix of a refusal, in the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whet.config.command_line import Command, load
from whet.errors import ConfigError, Problem

_FLAG = r"--\w+(?: (?!and\b|or\b|out\b|in\b|with)[\w./:+-]*\w)?"
_LEFT_OUT = re.compile(rf"(?:leave|without|in place of) ((?:{_FLAG}(?:, | and | or )?)+)")


def ways(fix: str) -> list[str]:
    """Return the ways out that a fix names, those with options."""
    return [way for way in re.split(r"; (?:or )?|, or ", fix) if "--" in way]


def followed(words: Sequence[str], way: str) -> list[str]:
    """Return the words of a command line with the options that this way gives, and without those that it leaves out."""
    end = list(words).index("--") if "--" in words else len(words)
    way = re.sub(r"in (--\w+), such as", r"\1", re.sub(r" \([^)]*\)", "", way))
    left_out = {flag.split()[0] for found in _LEFT_OUT.findall(way) for flag in re.findall(_FLAG, found)}
    given = [flag.split() for flag in re.findall(_FLAG, _LEFT_OUT.sub("", way))]
    replaced = left_out | {flag for flag, *_ in given}
    kept = [group for group in _groups(words[:end]) if group[0] not in replaced]
    return [word for group in (*kept, *given) for word in group] + list(words[end:])


def problems(command: Command, words: Sequence[str]) -> list[Problem]:
    """Return what the command's rules say of these words; what is missing on this machine does not count."""
    try:
        load(command, [*words, "--print_config"] if command.takes_config else words)
    except ConfigError as error:
        return list(error.problems)
    return []


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Return each option with its values; words before the first option come first."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups
