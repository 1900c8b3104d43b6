"""What looks like a secret: manifests are stored in the cluster and in repositories, where many can read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_NAMES = re.compile(
    r"(?:^|_)(?:SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)_KEY(?:_ID)?"
    r"|(?:HUB|HF|GITHUB|API|ACCESS|AUTH|BEARER|REFRESH)_TOKEN)$|^TOKEN$",
    re.IGNORECASE,
)
"""Variables and flags that hold a secret, whatever it looks like."""
_PERHAPS = re.compile(r"(?:^|_)(?:TOKEN|KEY|KEY_ID|AUTH)$", re.IGNORECASE)
"""Those that may also hold a token of a tokenizer (pad_token), or a column to sort by (sort_key)."""
_WORD = re.compile(r"<\S{1,40}>|\[[A-Z_]{1,20}\]|[A-Za-z]{1,16}(?:[_.][A-Za-z]{1,16}){0,2}|\d{1,6}|\W{1,3}")
"""Special tokens such as <pad>, </s>, <|endoftext|> and [PAD]; names of columns; small numbers."""
_VALUES = re.compile(
    r"""\bhf_[A-Za-z0-9]{16,}                              # Hugging Face
      | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}  # GitHub
      | \bglpat-[\w-]{16,}                                 # GitLab
      | \bsk-[\w-]{20,}                                    # OpenAI and others
      | \bxox[abprs]-[\w-]{10,}                            # Slack
      | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                      # AWS
      | \bAIza[\w-]{30,}                                   # Google
      | \beyJ[\w-]{10,}\.eyJ[\w-]{10,}                     # JSON web tokens
      | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY
      | [A-Za-z][A-Za-z0-9+.-]*://[^/\s@:]+:[^/\s@]+@      # user and password of a URL
    """,
    re.VERBOSE,
)
_NO_SECRET = frozenset({"", "true", "false", "null", "none", "0", "1"})


def in_variables(pairs: Sequence[str]) -> list[str]:
    """Return the names of the variables, NAME=VALUE, whose value is or looks like a secret."""
    split = [(name, value) for name, _, value in (pair.partition("=") for pair in pairs)]
    return [name for name, value in split if _is_secret(name, value)]


def in_command(words: Sequence[str]) -> list[str]:
    """Return the flags and positions of a command's words that are or look like secrets."""
    return list(_in_command(words))


def in_text(text: str) -> bool:
    """Return whether a part of the text looks like a secret."""
    return _VALUES.search(text) is not None


def _in_command(words: Sequence[str]) -> Iterator[str]:
    flag = ""
    for number, word in enumerate(words, start=1):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = name
            if equals and _is_secret(name.lstrip("-").replace("-", "_"), value):
                yield name
        elif _is_secret(flag.lstrip("-").replace("-", "_"), word):
            yield flag or f"word {number}"
        else:
            flag = ""


def _is_secret(name: str, value: str) -> bool:
    if value.lower() in _NO_SECRET:
        return False
    if in_text(value) or _NAMES.search(name):
        return True
    return _PERHAPS.search(name) is not None and _WORD.fullmatch(value) is None
