"""A file's bytes and text; other kinds of files are named in the error."""

from __future__ import annotations

import codecs
import io
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from whet.data.files.bad_rows import Rejected
from whet.errors import DataError, StorageError
from whet.hardware import memory

PARQUET = b"PAR1"
_READ_BYTES = 1 << 20
_TIMES_IN_MEMORY = 6
"""Largest number of bytes of memory for each byte of a file."""
_UNPACK = "unpack it and use the unpacked file"
_AS_TABLE = "write the table as Parquet or CSV, and use that file"
_BINARY = {
    b"\x1f\x8b": ("gzip", _UNPACK),
    b"PK\x03\x04": ("zip", f"{_UNPACK}; a spreadsheet (.xlsx): save it as CSV with UTF-8"),
    b"BZh": ("bzip2", _UNPACK),
    b"\xfd7zXZ\x00": ("xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("zstandard", _UNPACK),
    b"ARROW1": ("Arrow", _AS_TABLE),
    b"\xff\xff\xff\xff": ("Arrow stream", _AS_TABLE),
    b"FEA1": ("Feather", _AS_TABLE),
    b"ORC": ("ORC", _AS_TABLE),
    b"Obj\x01": ("Avro", _AS_TABLE),
    b"PARE": ("encrypted Parquet", "write it without encryption"),
    b"\x89HDF": ("HDF5", _AS_TABLE),
    b"SQLite format 3": ("SQLite", _AS_TABLE),
    b"\x80\x04": ("pickle", f"whet never reads pickles, as they can run code: {_AS_TABLE}"),
}
"""Kinds of files by their first bytes, and what to do with each."""
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file, without the byte order mark of UTF-8."""
    require_file(path)
    try:
        _refuse_too_large(path.stat().st_size, memory.available_bytes())
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise _unreadable(path, error) from error
    if data.startswith(_POINTER):
        raise Rejected(
            "this is a pointer of Git LFS, not the file itself",
            got=data[:120].decode(errors="replace"),
            why="the repository was cloned without its large files; the pointer only says which content belongs here",
            fix="download the content: git lfs pull, in the folder of the clone",
        )
    return data


_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the text that Git LFS leaves in place of a large file which has not been downloaded."""


def require_file(path: Path) -> None:
    """Raise DataError if there is no such file, StorageError if the system refuses to say."""
    fix = (
        "name a file, such as a copy of what a pipe gives; in training, a data set of the hub goes into --dataset_name"
    )
    try:
        mode = path.stat().st_mode  # where `exists` swallows a refusal of the system, from Python 3.14 on
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
            raise DataError(what=f"{path}: this is {what}, not a file", why="data is read from a file", fix=fix)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # of a name with a null byte
        raise DataError(what=f"{path}: no such file", why="the data is read from it", fix="correct the path") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _refuse_too_large(n_bytes: int, available_bytes: int | None) -> None:
    if available_bytes is not None and n_bytes * _TIMES_IN_MEMORY > available_bytes:
        raise Rejected(
            "the file is too large for this machine's memory",
            got=f"{n_bytes:,} bytes; {available_bytes:,} bytes of memory are free",
            why=f"reading takes up to {_TIMES_IN_MEMORY} times the size of the file",
            fix="split the file; to train on one part after the other, the --output_dir of one run is the "
            "--model_name_or_path of the next",
        )


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        what=f"{path}: cannot be read",
        got=str(error),
        why="the system refused",
        fix="check the path and its permissions",
    )


_SAMPLE = 4096
"""Bytes of a file that are checked to distinguish text from other data."""
_LARGEST_CONTROL_SHARE = 50
"""Text has fewer than one control character in this many; random bytes have one in nine."""


def text_of(data: bytes) -> str:
    """Return the UTF-8 text of a file; raise Rejected for packed files and other encodings."""
    for magic, (name, fix) in _BINARY.items():
        if data.startswith(magic):
            article = "an" if name[0] in "AEO" else "a"
            why = "data is read from JSON, JSON lines, CSV or Parquet"
            raise Rejected(f"this is {article} {name} file", why=why, fix=fix)
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            raise _not_utf8(f"the text is {name}", name)
    if _is_wide_text(data):
        raise _not_utf8("the text holds null bytes, as UTF-16 or UTF-32 does", "UTF-16LE")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        _refuse_binary(data)
        line = data.count(b"\n", 0, error.start) + 1
        _refuse_mixed(data, error.start, line)
        raise _not_utf8(
            f"byte {error.start} (line {line}) is not UTF-8; it may be Latin-1",
            "LATIN1",
            got=repr(data[max(error.start - 20, 0) : error.start + 20]),
        ) from None


def _refuse_mixed(data: bytes, bad: int, line: int) -> None:
    """Raise Rejected if other letters of the text are UTF-8: a conversion of the complete file would spoil these."""
    behind = (text for n, text in enumerate(io.BytesIO(data), start=1) if n > line)
    if data[:bad].isascii() and not any(_is_utf8(text) for text in behind if not text.isascii()):
        return
    raise Rejected(
        f"the file mixes encodings: byte {bad} (line {line}) is not UTF-8, and other letters are",
        got=repr(data[max(bad - 20, 0) : bad + 20]),
        why="text is read as UTF-8; a conversion of the complete file would spoil the letters that are UTF-8 already",
        fix=f"save line {line} alone as UTF-8: sed -n {line}p FILE | iconv -f LATIN1 -t UTF-8 shows it, if it is "
        "Latin-1; or leave it out",
    )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_wide_text(data: bytes) -> bool:
    """Return whether this is text with two or four bytes per character: every other byte of Latin letters is null."""
    sample = data[:_SAMPLE].rstrip(b"\0")
    return b"\0" in data[:4] and sample.count(0) * 3 > len(sample) and not _control_bytes(sample.replace(b"\0", b""))


def _refuse_binary(data: bytes) -> None:
    """Raise Rejected for bytes that are not text in any encoding: they contain null bytes and control characters."""
    sample = data[:_SAMPLE]
    if b"\0" in sample or _control_bytes(sample) * _LARGEST_CONTROL_SHARE > len(sample):
        raise Rejected(
            "this is not text",
            got=repr(data[:40]),
            why="data is read from JSON, JSON lines, CSV or Parquet",
            fix="name a file of text; one that was packed or encrypted has to be unpacked first",
        )


def _control_bytes(sample: bytes) -> int:
    return sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in sample)


def _not_utf8(what: str, encoding: str, got: str | None = None) -> Rejected:
    return Rejected(
        what,
        got=got,
        why="text is read as UTF-8: in another encoding the same bytes are other characters",
        fix=f"save the file as UTF-8, and name that: iconv -f {encoding} -t UTF-8 OLD > NEW",
    )


def contents(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return checksums of the files that settings of a run name, and of those in the folder of a data set, by setting.

    In a folder the names count too: `datasets` chooses by them which file belongs to which split. A data set of the hub
    has no checksum: it is known by its name.
    """
    named = {name: text for name, text in settings.items() if name.endswith("_file") or name == "dataset_name"}
    found: dict[str, str] = {}
    for name, path in ((name, Path(text)) for name, text in named.items() if text):
        if path.is_file():
            found[name] = f"content {digest_of([path])}"
        elif files := _files_below(path):
            found[name] = f"content {digest_with_names(path, files)}"
    return found


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, in order.

    Those behind links to folders are among them, as `datasets` reads these if the card of the data names them. Each
    folder counts once: links may lead in a circle.
    """
    found: list[Path] = []
    seen: set[str] = set()
    for place, inner, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner.sort()
        found += (path for name in sorted(names) if (path := Path(place, name)).is_file())
    return found


def digest_with_names(folder: Path, paths: Iterable[Path]) -> str:
    """Return a checksum of these files of a folder: of their names in it, and of their content."""
    found = xxhash.xxh3_128()
    for path in paths:
        found.update(f"{digest_of([path])} ".encode() + os.fsencode(path.relative_to(folder)) + b"\0")
    return found.hexdigest()


def digest_of(paths: Iterable[Path]) -> str:
    """Return a checksum of the content of these files."""
    found = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                found.update(piece)
    return found.hexdigest()
