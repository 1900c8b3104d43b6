"""What looks like a secret: manifests, command lines and messages are read by many."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from whet.errors import MASK

_SERVICES = (
    "ANTHROPIC|AWS|AZURE|CLEARML|COHERE|COMET|DATADOG|GCP|GITHUB|GITLAB|GOOGLE|GH|GROQ|HF|HUB|HUGGINGFACE|KAGGLE|MISTRAL"
    "|MLFLOW|NEPTUNE|NGC|NPM|NVIDIA|OPENAI|PYPI|REPLICATE|SENTRY|SLACK|SWANLAB|WANDB"
)
_NAMES = re.compile(
    rf"""(?:SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION)$
       | (?:^|_)(?:PWD|PAT|AUTHORIZATION_HEADER)$
       | (?<!LOW)(?<!HIGH)(?<!MULTI)(?<!SINGLE)(?<!FORWARD)(?<!BACKWARD)(?<!_N)(?<!^N)(?:^|_)PASS$
       | (?:^|_)(?:API|ACCESS|ACCOUNT|SECRET|PRIVATE|AUTH|SIGNING|ENCRYPTION|LICENSE|{_SERVICES})_?KEY(?:_ID)?$
       | (?:^|_)(?:WEBHOOK|WEBHOOK_URL|HOOK_URL|NETRC)$
       | (?:^|_)(?:API|ACCESS|AUTH|BEARER|REFRESH|SESSION|SERVICE|{_SERVICES})_?TOKEN$
       | ^TOKEN$
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Variables and flags that hold a secret, whatever it looks like; a word such as PGPASSWORD may be glued to another."""
_PERHAPS = re.compile(r"(?:^|_)(?:TOKEN|KEY|KEY_ID|AUTH|SIG|SIGNATURE|DSN)$", re.IGNORECASE)
"""Those that may also hold a token of a tokenizer (pad_token), a column to sort by (sort_key), or a plain address."""
_NUMBERED = re.compile(r"_?[vV]?\d+$")
"""The end of HF_TOKEN_2 and SIGNING_SECRET_V2."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PLAIN_WORD = re.compile(
    r"(?:[A-Z]{1,16}|[a-z]{0,16}(?:[A-Z][a-z]{1,15}){0,4}|[^\W\d_A-Za-z]{1,16})\d{0,4}|\d{1,6}|0x[0-9A-F]{2}"
)
"""A word, with the number of a column or a special token: label_0, col1, userName."""
_MOST_WORDS = 6
_BETWEEN_WORDS = re.compile(r"\\[nrt]|[\W_]")
"""Separators of words, and the newlines of separators such as `\\n###\\n`."""
_PATH = re.compile(r"(?:/[\w.-]{1,64})+/?")
_REFERENCE = re.compile(r"\$\(\w+\)|\$\{[\w.:]+\}")
"""A variable that the kubelet, a shell or Hydra replaces."""
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
      | [A-Za-z][A-Za-z0-9+.-]*://[^/\s@:]*:(?!\$[({])[^/\s@]+@      # password of a URL, with or without a user
      | [A-Za-z][A-Za-z0-9+.-]*://(?=[^/\s@]*\d)[A-Za-z0-9_-]{16,}@  # a token in the place of a user: DSNs of Sentry
      | \bhttps://[^\s/]+/\S*(?:hooks?|webhookb?\d?)/\S*[\w-]{16,}   # webhooks: Slack, Discord, Teams, Mattermost
      | \bhttps://hooks?\.[^\s/]+/\S*[\w-]{6,}                   # Slack, Zapier
      | \bhttps://[^\s/]*webhook[^\s/]*/\S*[\w-]{16,}
      | \b\d{6,12}:AA[\w-]{30,}                               # bots of Telegram
      | \b(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+)*password\s+\S+  # netrc
      | \b(?:Bearer|Basic)\s+(?=\S*[A-Z0-9])(?=\S*[a-z0-9])[\w+/.~-]{12,}=*  # a header of HTTP
    """,
    re.VERBOSE,
)
_PAIRS = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)["']?\s*[=:]\s*["']?(?:(?:Bearer|Basic|Token)\s+)?(?=(?P<value>[^\s"'&;,}]+))""",
    re.IGNORECASE | re.VERBOSE,
)
"""Names with values within a text: settings of Hydra, headers, JSON, connection strings, the query of a URL."""
_NO_SECRET = frozenset({"", "true", "false", "null", "none", "0", "1"})


def in_variables(pairs: Sequence[str]) -> list[str]:
    """Return the names of the variables, NAME=VALUE, whose value is or looks like a secret."""
    split = [(name, value) for name, _, value in (pair.partition("=") for pair in pairs)]
    return [masked(name) for name, value in split if in_text(name) or _is_secret(name, value)]


def in_command(words: Sequence[str]) -> list[str]:
    """Return the flags and positions of a command's words that are or look like secrets."""
    return list(dict.fromkeys(name for _, name in _in_command(words)))


def hidden(words: Sequence[str]) -> tuple[list[str], dict[int, str]]:
    """Return the words with *** in place of those that are or look like secrets, and these by their index."""
    found = {place: words[place] for place, _ in _in_command(words)}
    shown = [_shown(word) if place in found else word for place, word in enumerate(words)]
    return shown, found


def _shown(word: str) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}={MASK}" if equals and name.startswith("--") and not in_text(name) else MASK


def in_text(text: str) -> bool:
    """Return whether a part of the text is or looks like a secret: a token, or a pair such as password=VALUE."""
    return is_token(text) or any(_is_named(found["name"], found["value"]) for found in _PAIRS.finditer(text))


def is_token(text: str) -> bool:
    """Return whether a part of the text has the form of a token, or of a URL with a password, whatever its name is."""
    return _VALUES.search(text) is not None


def masked(text: str) -> str:
    """Return the text as an error may show it: nothing of it if it contains a secret."""
    return MASK if in_text(text) else text


def _in_command(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each secret, and the flag before it or its position."""
    flag = ""
    for number, word in enumerate(words, start=1):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = "" if in_text(name) else name
            if in_text(word) or (equals and _is_named(name, value)):
                yield number - 1, flag or f"word {number}"
        elif _is_secret(flag, word):
            yield number - 1, flag or f"word {number}"
        else:
            flag = ""


def _is_secret(name: str, value: str) -> bool:
    return in_text(value) or _is_named(name, value)


def _is_named(name: str, value: str) -> bool:
    """Return whether a value is a secret because of its name."""
    if value.lower() in _NO_SECRET or _REFERENCE.fullmatch(value):
        return False
    name = _NUMBERED.sub("", _HUMP.sub("_", name.lstrip("-")).replace("-", "_").replace(".", "_"))
    if _NAMES.search(name):
        return _PATH.fullmatch(value) is None
    return _PERHAPS.search(name) is not None and not _is_plain(value)


def _is_plain(value: str) -> bool:
    """Return whether a text consists of a few words, as names of columns and tokens of tokenizers do."""
    words = [word for word in _BETWEEN_WORDS.split(value) if word]
    return len(words) <= _MOST_WORDS and all(_PLAIN_WORD.fullmatch(word) for word in words)
