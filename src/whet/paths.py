"""whet's folder in the user's cache, and UTF-8 names of folders for libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whet import system


def default_cache_dir() -> Path | None:
    """Return whet's folder in the user's cache; None for a user without a home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "whet"
    try:
        return Path.home() / ".cache" / "whet"
    except RuntimeError:
        return None


def keep_newest(path: Path, text: str, most: int) -> str | None:
    """Write the text to a file of the cache at once, and remove all but the newest `most` files of its kind.

    The kind is the name up to its first dash. Returns why nothing could be written; None if it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(text, "utf-8")
        unfinished.replace(path)
    except OSError as error:
        return f"{path.parent} cannot be written ({error.strerror})"
    kind = path.name.partition("-")[0]
    with suppress(OSError):  # another process removes them too
        for old in sorted(path.parent.glob(f"{kind}-*"), key=lambda one: one.stat().st_mtime)[:-most]:
            old.unlink()
    return None


NO_CACHE = "this user has no home folder (set XDG_CACHE_HOME)"
"""Why nothing can be kept if `default_cache_dir` is None."""


@contextmanager
def utf8_name(folder: Path) -> Iterator[Path]:
    """Yield a UTF-8 name of the folder: its own, or one through an open file descriptor (Linux)."""
    if _is_utf8(folder):
        yield folder
        return
    with system.numbered_folder(folder) as name:
        yield name


def _is_utf8(folder: Path) -> bool:
    """Return whether the name on the disk is what libraries make of it, which is UTF-8 whatever the locale."""
    name = str(folder)
    try:
        return os.fsencode(name) == name.encode("utf-8")
    except UnicodeEncodeError:  # Python stores bytes that it cannot decode as halves of surrogate pairs
        return False
