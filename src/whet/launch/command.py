"""What is launched: a command of whet, a Python script or module, or any program."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whet.errors import ConfigError


def command_line(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words of the process to start; `commands` are the names of whet's own. Raises ConfigError."""
    if not words:
        raise ConfigError(
            what="there is nothing to launch",
            got="no words after --",
            why="the launcher starts a command once for each rank",
            fix="end the line with the command: whet launch -- qa --do_train ..., or whet launch -- train.py",
        )
    first = words[0]
    if first in commands:
        return [sys.executable, "-m", "whet", *words]
    if first == "-m":
        return [sys.executable, *words]
    if Path(first).suffix == ".py" and Path(first).is_file():
        return [sys.executable, *words]
    if shutil.which(first) is not None:
        return list(words)
    raise ConfigError(
        what="what is to be launched does not exist",
        got=first,
        why="it is no command of whet, no Python script here, and no program on PATH",
        fix=f"name one of {', '.join(commands)}, the path of a script that ends with .py, -m MODULE, or a program",
    )


def resuming(command: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the command that continues a failed run: whet's own resume from their newest checkpoint."""
    own = list(command[:3]) == [sys.executable, "-m", "whet"] and command[3] in commands
    given = any(word.partition("=")[0].replace("-", "_") == "__resume_from_checkpoint" for word in command)
    return [*command, "--resume_from_checkpoint", "auto"] if own and not given else list(command)
