"""Names of folders for libraries that take UTF-8 alone; file systems take any bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def utf8_name(folder: Path) -> Iterator[Path]:
    """Yield a name of the folder that is UTF-8: its own, or else one by an open file descriptor (Linux)."""
    if _is_utf8(folder):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _is_utf8(folder: Path) -> bool:
    try:
        str(folder).encode("utf-8")
    except UnicodeEncodeError:  # Python keeps other bytes as halves of surrogate pairs
        return False
    return True
