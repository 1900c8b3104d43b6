"""Errors on the terminal: every problem with what, got, why and fix."""

import os
import sys

from whet import console
from whet.errors import ConfigError, StorageError, WhetError
from whet.hardware import memory

_ERROR = "error: "
_STYLES = {"  got:": "yellow", "  fix:": "green"}
_LEAST_BYTES = 1100 << 20
"""Of address space: with less, torch hangs, or ends the process with std::bad_alloc, which nobody can catch."""


def require_address_space() -> None:
    """Raise ConfigError if the process has not the address space that torch's libraries take."""
    limit = memory.address_space_bytes()
    if limit is not None and limit < _LEAST_BYTES:
        raise ConfigError(
            what="the limit on this process's address space is too small",
            got=f"{limit:,} bytes",
            why=f"torch's libraries alone take about {_LEAST_BYTES:,}",
            fix="raise it: ulimit -v unlimited",
        )


def refusal(error: BaseException) -> WhetError | None:
    """Return the error of what the system refused, memory or a file, to print; None for any other exception."""
    if (lack := memory.lack(error)) is not None:
        return lack
    if isinstance(error, OSError):
        return StorageError(
            what="the system refused to read or to write",
            got=str(error),
            why="the command cannot continue without it",
            fix=f"check that the place exists, that this user may use it, and that its disk has room{_moved(error)}",
        )
    return None


_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_HOME",
            "XDG_CACHE_HOME")  # fmt: skip
"""Variables that name folders for files of libraries; the more special come first."""
_USUAL = {
    "/torchinductor_": "TORCHINDUCTOR_CACHE_DIR", "/.cache/huggingface": "HF_HOME", "/.cache/": "XDG_CACHE_HOME",
}  # fmt: skip
"""Part of a path that a library has chosen -> the variable that names another folder."""


def _moved(error: OSError) -> str:
    """Return how to name another folder, if a variable of the environment does that; else nothing."""
    if "No usable temporary directory" in str(error):
        variable = "TMPDIR"
    else:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        named = {folder: name for name in _FOLDERS if (folder := os.environ.get(name))}
        parts = [*named.items(), *_USUAL.items()]
        variable = next((variable for part, variable in parts if any(part in name for name in names)), None)
    return "" if variable is None else f"; or name a folder that this user may write to in the variable {variable}"


def complain(error: WhetError) -> None:
    """Print the problems to standard error, in colour where that is a terminal."""
    if sys.stderr.isatty():
        _in_colour(error)
    else:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)


def _in_colour(error: WhetError) -> None:
    from rich.console import Console
    from rich.text import Text

    shown, width = Console(stderr=True), console.width()
    for problem in error.problems:
        what, *rest = str(problem).splitlines()
        first, *others = console.folded_message(f"{_ERROR}{what}", width, "  ")
        shown.print(Text.assemble((_ERROR, "bold red"), (first.removeprefix(_ERROR), "bold")), soft_wrap=True)
        for line in others:
            shown.print(Text(line, style="bold"), soft_wrap=True)
        for line in rest:
            for part in console.folded_message(line, width, " " * 7):
                shown.print(Text(part, style=_STYLES.get(line[:6], "")), soft_wrap=True)
