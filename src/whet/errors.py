"""Errors in four parts: what, got, why, fix. Every error that a user can cause is a `WhetError`."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

MASK = "***"
"""Printed in place of a secret."""
# pathlib turns two slashes into one; a match begins where a word does, or a text of one long word would take for ever
_USER_INFO = re.compile(r"((?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+:/{1,2})[^/\s@]+@")
_SECRET_NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|DSN|WEBHOOK|WEBHOOK_URL|NETRC)$", re.IGNORECASE
)
_SHORTEST_SECRET = 8
_LONGEST_GOT = 300
_LONGEST_PART = 6000
"""Characters of the other parts of an error; only data in them can be longer."""
_HARMLESS = "\u200c\u200d"
"""Format characters that some languages need in their words; they move nothing on the screen."""

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_BAD_DATA = 65
EXIT_NON_FINITE = 70
EXIT_CANNOT_CREATE = 73
EXIT_IO = 74
EXIT_STOPPED_AND_SAVED = 75
EXIT_BAD_CONFIG = 78


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, with what the reader needs to fix it."""

    what: str
    """What is wrong, in one clause."""
    got: object = None
    """The offending value; None if there is none to show."""
    why: str
    """The rule that it breaks."""
    fix: str
    """What to do; names a flag, a field or a command."""

    def __str__(self) -> str:
        return "\n".join(text if name == "what" else f"  {name}: {text}" for name, text in self.parts().items())

    def parts(self) -> dict[str, str]:
        """Return the parts by name, as they are shown: shortened, without secrets; `got` only if there is one."""
        got = {} if self.got is None else {"got": _short(self.got, _LONGEST_GOT)}
        parts = {"what": self.what, **got, "why": self.why, "fix": self.fix}
        return {name: hide_secrets(_short(escape_controls(text), _LONGEST_PART)) for name, text in parts.items()}


class WhetError(Exception):
    """The base of every error that a user of whet can cause; `problems` holds every problem that was found."""

    exit_code = EXIT_OTHER
    again: Mapping[str, object] = MappingProxyType({})
    """The settings that resume the run once the cause is fixed; none if there is nothing to resume."""

    def __init__(self, *, what: str, why: str, fix: str, got: object = None) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what=what, got=got, why=why, fix=fix),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> WhetError:
        """Return one error that reports every problem of the list."""
        first = problems[0]
        error = cls(what=first.what, got=first.got, why=first.why, fix=first.fix)
        error.problems = tuple(problems)
        error.args = ("\n".join(str(problem) for problem in problems),)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process by kind and texts: the values in `got` may be of any class."""
        shown = [replace(one, got=None if one.got is None else _short(one.got, _LONGEST_GOT)) for one in self.problems]
        return type(self).of, (shown,)


class ConfigError(WhetError):
    """A flag, field or combination of them cannot be honoured."""

    exit_code = EXIT_BAD_CONFIG


class DataError(WhetError):
    """The input data is not valid."""

    exit_code = EXIT_BAD_DATA


class OutputError(WhetError):
    """The output folder cannot be created or written."""

    exit_code = EXIT_CANNOT_CREATE


class StorageError(WhetError):
    """Reading or writing failed, or a file is damaged."""

    exit_code = EXIT_IO


class NonFiniteError(WhetError):
    """The training produced NaN or infinity and was stopped."""

    exit_code = EXIT_NON_FINITE


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Return the text on one line, with escapes for everything that controls a terminal or reorders its text.

    These are control characters, format characters such as those that override the writing direction, and line
    separators. A byte of a file name that is not UTF-8 is shown as \xNN. Characters in `keep` are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(_escape(char) if char not in keep and _controls(char) else char for char in text)


def _controls(char: str) -> bool:
    return char not in _HARMLESS and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # how Python stores a byte that it could not decode
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def hide_secrets(text: str) -> str:
    """Return the text without the user and password of a URL, and without secrets from the environment.

    A variable counts as a secret because of its name: HF_TOKEN, WANDB_API_KEY, DB_PASSWORD. cls_token does not.
    """
    text = _USER_INFO.sub(rf"\1{MASK}@", text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and value in text and _SECRET_NAMES.search(name):
            text = text.replace(value, MASK)
    return text


def _short(value: object, limit: int) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
