"""Checks a command that a page shows, without running it."""

import re
from importlib.util import find_spec
from pathlib import Path

from whet.cli.commands import COMMANDS, command
from whet.config.command_line import load
from whet.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM_FLAGS = {"--help", "-h", "help", "--version", "-V"}


def check_command(words: list[str]) -> None:
    """Check a command of this project, also one behind a launcher; others are not ours to check."""
    programs = [Path(word).name for word in words]
    if programs[0] == "make":
        targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
        asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(asked) <= targets, f"make has no {set(asked) - targets}"
    elif "whet" in programs:
        _check_whet(words[programs.index("whet") + 1 :])
    elif "-m" in words and words[words.index("-m") + 1].startswith("whet."):
        assert find_spec(words[words.index("-m") + 1])


def _check_whet(words: list[str]) -> None:
    """Read the words after `whet` as the program does, but do nothing; raises ConfigError as it does."""
    if words and words[0] in _PROGRAM_FLAGS:
        return
    if not words or words[0] not in COMMANDS:
        raise ConfigError(what="no such command", got=words[:1], why="whet does not have it", fix="see whet --help")
    load(command(words[0]), words[1:])
