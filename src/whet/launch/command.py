"""What is launched: a command of whet, a Python script or module, or any program."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whet.config import secrets
from whet.config.ranks import require_output_for_restarts
from whet.errors import ConfigError
from whet.launch.words import is_python

_NO = {"false", "no", "n", "f", "0"}


def command_line(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words of the process to start; `commands` are the names of whet's own. Raises ConfigError."""
    require_words(words)
    first = words[0]
    if first in commands:
        return [sys.executable, "-m", "whet", *words]
    if first == "-m":
        return [sys.executable, *words]
    if Path(first).suffix == ".py" and Path(first).is_file():
        return [sys.executable, *words]
    if shutil.which(first) is not None:
        _require_no_secrets(words)
        return list(words)
    raise ConfigError(
        what="what is to be launched does not exist",
        got=first,
        why="it is no command of whet, no Python script here, and no program on PATH",
        fix=f"name one of {', '.join(commands)}, the path of a script that ends with .py, -m MODULE, or a program",
    )


def _require_no_secrets(words: Sequence[str]) -> None:
    """Refuse secrets in the command line of a program that is not Python, which whet cannot keep out of it."""
    if not is_python(words) and (found := secrets.in_command(words)):
        raise ConfigError(
            what="the command line of each rank would show a secret",
            got=", ".join(found),
            why="every user of a machine can read the command lines of its processes; whet keeps secrets out of those "
            "of Python scripts and modules alone",
            fix="let the program read it from a variable, which ranks inherit (with several hosts: --env NAME), or "
            "name the Python script itself: whet launch -- train.py ...",
        )


def require_words(words: Sequence[str]) -> None:
    """Raise ConfigError if there is no command, or no module after -m."""
    if not words:
        raise ConfigError(
            what="there is nothing to launch",
            got="no words after --",
            why="the launcher starts a command once for each rank",
            fix="end the line with the command: whet launch -- qa --do_train ..., or whet launch -- train.py",
        )
    if tuple(words) == ("-m",):
        raise ConfigError(
            what="-m has no name of a module after it",
            got="-m as the last word",
            why="python -m runs the module that is named after it",
            fix="name it: whet launch -- -m package.train",
        )


def runs_alone(name: str, ranked: Collection[str]) -> ConfigError:
    """Return the error of a command of whet that several ranks cannot run together."""
    return ConfigError(
        what=f"whet {name} runs in one process",
        got=f"several ranks of whet {name}",
        why="each rank would do the complete work again, over the same output folder",
        fix="leave --nproc_per_node and the hosts out: one process then uses all cores of this machine; several ranks "
        f"can run {', '.join(sorted(ranked))}, and scripts that use torch.distributed or whet.Trainer",
    )


def require_restartable(words: Sequence[str], commands: Collection[str], max_restarts: int) -> None:
    """Raise ConfigError for a command of whet that would overwrite the folder which a restart continues from."""
    if not words or words[0] not in commands:
        return
    for number, word in enumerate(words):
        name, _, value = word.replace("-", "_").partition("=")
        if name == "__overwrite_output_dir":
            follows = value or (words[number + 1] if number + 1 < len(words) else "")
            require_output_for_restarts(overwrites=follows.lower() not in _NO, n_restarts=max_restarts)
