"""A file's bytes, and the text in them; what is neither text nor Parquet is named for what it is."""

from __future__ import annotations

from pathlib import Path

from whet.errors import DataError, StorageError
from whet.tasks.qa.rejected import Rejected

PARQUET = b"PAR1"
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
}


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    require_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def require_file(path: Path) -> None:
    """Raise DataError where there is no such file, StorageError where the system does not tell."""
    fix = "name a file; a folder or a hub name belongs into --dataset_name"
    try:
        if not path.exists():
            raise DataError(what=f"{path}: no such file", why="the questions are read from it", fix="correct the path")
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise DataError(what=f"{path}: this is {what}, not a file", why="questions are read from a file", fix=fix)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        what=f"{path}: cannot be read",
        got=str(error),
        why="the system refused",
        fix="check the path and its permissions",
    )


def text_of(data: bytes) -> str:
    """Return the UTF-8 text of a file; raise Rejected for packed files and other encodings."""
    for magic, name in _PACKED.items():
        if data.startswith(magic):
            raise Rejected(
                f"this is a {name} file",
                why="questions are read from plain files",
                fix="unpack it and name what comes out",
            )
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            raise _not_utf8(f"the text is {name}")
    if b"\0" in data[:4] and data.strip(b"\0"):
        raise _not_utf8("the text holds null bytes, as UTF-16 or UTF-32 does")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(
            f"byte {error.start} (line {line}) is not UTF-8; it may be Latin-1",
            got=repr(data[max(error.start - 20, 0) : error.start + 20]),
        ) from None


def _not_utf8(what: str, got: str | None = None) -> Rejected:
    return Rejected(
        what,
        got=got,
        why="questions are read as UTF-8 without a byte order mark: elsewhere the same bytes mean other characters",
        fix="save the file as plain UTF-8 (iconv -f OLD -t UTF-8 FILE)",
    )
