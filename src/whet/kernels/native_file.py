"""The file of the native operators' library: where it is, and what names its content. Nothing here imports torch."""

import hashlib
import importlib.metadata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from whet.version import DISTRIBUTION

FILE_NAME = "_native.so"


def find() -> Path | None:
    """Return the library's file, usable or not; None if there is none."""
    return next((path for path in _candidates() if path.exists()), None)


@cache
def digest() -> str | None:
    """Return the digest of the library that this process finds; None if there is none, or it cannot be read.

    What was measured with one library does not hold for another one, whatever its version.
    """
    path = find()
    try:
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _candidates() -> Iterator[Path]:
    """Yield possible files: built in place, or installed (an editable install puts it into site-packages)."""
    yield Path(__file__).with_name(FILE_NAME)
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(installed.locate_file(f"whet/kernels/{FILE_NAME}")))
