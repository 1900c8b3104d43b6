"""Finds files and links at the names of future checkpoints before the first step; they are never overwritten."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from whet.errors import OutputError

_NAMES = re.compile(r"checkpoint-(\d{1,18})|\.checkpoint-(\d{1,18})\.(?:partial|replaced)")
_MOST_NAMED = 3


def require_free_names(output_dir: Path, *, after: int = 0, last: int | None = None) -> None:
    """Raise OutputError (exit 73) for a link or file at the name of a checkpoint of a later step than `after`.

    `last` is the last step of the run; None: it is not known yet.
    """
    in_the_way = [path for step, path in _strange(output_dir) if step > after and (last is None or step <= last)]
    if not in_the_way:
        return
    words = " ".join(shlex.quote(str(path)) for path in in_the_way[:_MOST_NAMED])
    more = len(in_the_way) - _MOST_NAMED
    raise OutputError(
        what="a future checkpoint cannot get its name: something is there already",
        got="; ".join(map(_described, in_the_way[:_MOST_NAMED])) + (f"; and {more} more" if more > 0 else ""),
        why="whet creates a folder for each checkpoint; it replaces nothing else, and never writes through a link",
        fix=f"move it away: mv {words} ELSEWHERE; or use another --output_dir",
    )


def _strange(output_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) for files and links with the name of a checkpoint, or of one that is being written."""
    for path in _entries(output_dir):
        named = _NAMES.fullmatch(path.name)
        if named and (path.is_symlink() or not path.is_dir()):
            yield int(named[1] or named[2]), path


def _described(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}"  # noqa: PTH115 - as it stands there
    return f"{path} is a file" if path.is_file() else f"{path} is neither a file nor a folder"


def _entries(folder: Path) -> list[Path]:
    """Return what is in the folder; empty if it cannot be read, which is reported when the run writes there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
