"""What a run that was stopped prints: where it saved, and the command that resumes it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence

from whet.cli import commands
from whet.config import ranks
from whet.config.settings import MASK, options_of
from whet.errors import escape_controls
from whet.watch.stop import Stopped


def tell(stopped: Stopped, argv: Sequence[str]) -> int:
    """Print what is saved, and the command that resumes on a line of its own; return the exit code."""
    if ranks.place_or_alone().is_first:
        print(f"whet: {escape_controls(str(stopped))}", file=sys.stderr)
    tell_command(argv, stopped.again)
    return int(str(stopped.code))


def tell_command(argv: Sequence[str], again: Mapping[str, object]) -> None:
    """Print the command that resumes with these settings, if there are any: alone on its line, so it can be copied.

    Of several ranks the first prints it; how they were started, a rank does not know.
    """
    place = ranks.place_or_alone()
    if again and place.is_first:
        how = "" if place.n_ranks == 1 else f" your launcher and, for its {place.n_ranks} ranks, the command"
        print(f"whet: continue with{how}:\n\n{command(argv, again)}\n", file=sys.stderr)


def command(argv: Sequence[str], again: Mapping[str, object]) -> str:
    """Return the command line as it was, secrets masked, with these settings in place of those that it had."""
    added = [word for name, value in again.items() for word in (f"--{name}", _text(value))]
    return " ".join(map(_shell_word, ["whet", *_without(_masked(argv), again), *added]))


def _without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words but for these options and their values; a word with dashes is no value."""
    kept: list[str] = []
    value_goes = False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        is_named = word.startswith("-") and name.replace("-", "_") in names
        if not is_named and not (value_goes and not word.startswith("--")):
            kept.append(word)
        value_goes = is_named and not equals
    return kept


def _shell_word(word: str) -> str:
    """Return the word as a shell reads it back; bytes that are not to be printed stand in it as escapes ($'...')."""
    encodable = escape_controls(word) == word and _prints(word)
    if encodable:
        return shlex.quote(word)
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(escaped)}'"


def _prints(word: str) -> bool:
    try:
        word.encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _masked(argv: Sequence[str]) -> list[str]:
    parts = commands.command(argv[0]).parts
    secrets = {option.name for part in parts for option in options_of(part).values() if option.secret}
    words: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.lstrip("-").partition("=")
        is_secret = word.startswith("-") and name.replace("-", "_") in secrets
        words.append(MASK if hide else f"{word.partition('=')[0]}={MASK}" if is_secret and equals else word)
        hide = is_secret and not equals
    return words


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
