"""Files with settings that a command of whet reads in the pods. Those that this machine has too are checked here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from whet.config import deepspeed, secrets
from whet.config.command_line import read_config
from whet.errors import MASK, ConfigError

_LONE = (".yaml", ".yml", ".json")


class Named(NamedTuple):
    """A file or folder that the words of a command name: the option, and the path in the pods."""

    option: str
    path: str

    @property
    def is_here(self) -> bool:
        """Whether this machine has a file at that path, too."""
        try:
            return Path(self.path).is_file()
        except (OSError, ValueError):
            return False


def split(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[Named]]:
    """Return the words without these options, and what the options name. A file without a flag is one of `config`."""
    kept: list[str] = []
    named: list[Named] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, inline = flag(word), "=" in word
        text = word.partition("=")[2] if inline else next(iter(left), "")
        if name in options and text and not text.lstrip().startswith("{"):
            named.append(Named(name, text))
            left = left if inline else left[1:]
        elif len(kept) == 1 and not name and PurePosixPath(word).suffix in _LONE:
            named.append(Named("config", word))
        else:
            kept.append(word)
    return kept, named


def flag(word: str) -> str:
    """Return the option that a word names; empty if it is no flag."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""


def named_in(config: Named) -> list[Named]:
    """Return DeepSpeed's file if a settings file names one."""
    given = read_config(config.path).get("deepspeed")
    return [Named("deepspeed", given)] if isinstance(given, str) else []


def require_no_secret(file: Named) -> None:
    """Raise ConfigError if a file has a secret in it, before any other error could show the value."""
    found = sorted({secrets.masked(name) for name, value in _pairs(_content(file)) if _is_secret(name, value)})
    if found:
        raise ConfigError(
            what=f"the file of --{file.option} contains a secret in clear",
            got=", ".join(f"{name} {MASK} in {file.path}" for name in found),
            why="everyone who may use the image or the claim with this file could read it",
            fix="remove it from the file; make a Secret from a file that holds only the value, run: kubectl create "
            "secret generic hub --from-file=HF_TOKEN; then use --env_from_secret HF_TOKEN=hub/HF_TOKEN before the -- "
            "(whet reads HF_TOKEN by itself)",
        )


def _content(file: Named) -> Mapping[str, Any]:
    """Return what a file holds; raises ConfigError as the command would in the pod."""
    if file.option == "config":
        return read_config(file.path)
    try:
        return deepspeed.read(file.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            what="the configuration of DeepSpeed cannot be read",
            got=str(error),
            why="--deepspeed names a file that holds one JSON object, in which no key is given twice",
            fix="correct the file: python -m json.tool FILE shows where it is no JSON",
        ) from None


def _pairs(part: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value of a file with the name of its key."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _pairs(value, str(key))
    elif isinstance(part, list):
        for value in part:
            yield from _pairs(value, name)
    else:
        yield name, str(part)


def _is_secret(name: str, value: str) -> bool:
    return bool(secrets.in_variables([f"{name}={value}"]))
