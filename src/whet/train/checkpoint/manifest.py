"""The seal of a checkpoint folder: `MANIFEST.json` names every file with its size and checksum, and seals itself.

Nothing here follows a link, waits on a pipe or leaves the folder: a folder from another source may hold anything.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from whet.paths import follow_umask

MANIFEST = "MANIFEST.json"
ONLY_MODEL = "only_model"
"""The fact of a checkpoint that no run can resume from."""
BEGINS_WITH, WEIGHTS, FINISHED = "begins_with", "weights", "finished"
"""Facts: checksums of the weights that the run began with and of those it holds, and whether the run ended with it."""
FORMAT_VERSION = 2
_CHUNK_BYTES = 1 << 22
_DEEPEST = 8
"""Most parts of a file's name: tokenizers and processors write to sub-folders, one level deep."""
_MOST_MANIFEST_BYTES = 16 << 20
_LIGHT_BYTES = 1 << 16
"""Files up to this size are read completely even with `light`."""


def seal(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Sync every file of the folder to disk, then the manifest that lists them, then the folder itself."""
    files = {}
    for path in _entries(folder):
        follow_umask(path)
        fsync(path)
        name = path.relative_to(folder).as_posix()
        if not _is_name(name):
            raise OSError(None, f"{name!r} is not a file name that a checkpoint may hold")
        files[name] = {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
    for path in _folders(folder):
        fsync(path) if any(path.iterdir()) else path.rmdir()
    manifest = {**facts, "format_version": FORMAT_VERSION, "step": step, "files": files}
    text = json.dumps(manifest | {"checksum": digest_of(manifest)}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", "utf-8")
    fsync(folder / MANIFEST)
    fsync(folder)


def problems_of(folder: Path, step: int | None = None, *, light: bool = False) -> list[str]:
    """Return what is wrong with a sealed folder, one line each; empty if every byte is as written.

    `step` is the step that the manifest must have. `light` compares the sizes of large files, not their content.
    """
    try:
        manifest = json.loads(_read_plain(folder / MANIFEST))
        files: dict[str, dict[str, Any]] = manifest["files"]
        checksum = manifest.pop("checksum")
        if checksum != digest_of(manifest):
            return [f"{MANIFEST}: does not match its own checksum"]
        odd = _odd_facts(manifest, step) + [f"{name!r}: is not a file name" for name in files if not _is_name(name)]
        if odd:
            return odd
        present = {path.relative_to(folder).as_posix() for path in _entries(folder)} - {MANIFEST}
        present |= {path.relative_to(folder).as_posix() for path in _folders(folder)}
        known = {str(part) for name in files for part in (name, *PurePosixPath(name).parents)}
        odd = [f"{name}: is not in the manifest" for name in sorted(present - known)]
        linked = _behind_links(folder, files)
        odd += [f"{name}: lies behind a link" for name in sorted(linked)]
        return odd + [
            line
            for name, facts in files.items()
            if name not in linked and (line := _file_problem(folder, name, facts, light))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST}: {error or type(error).__name__}"]


def holds_only_model(folder: Path) -> bool:
    """Return whether the checkpoint was written with save_only_model, so that no run can resume from it."""
    return (facts_of(folder) or {}).get(ONLY_MODEL) is True


def sealed_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the name, size in bytes and checksum of each file that the manifest lists; nothing if it is damaged."""
    if facts_of(folder) is None:
        return {}
    files = json.loads(_read_plain(folder / MANIFEST))["files"]
    return {name: (one["bytes"], one["xxh3_128"]) for name, one in files.items()}


def n_ranks_of(folder: Path) -> int:
    """Return how many ranks trained the run that wrote this checkpoint."""
    return int((facts_of(folder) or {}).get("n_ranks", 1))


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest without its list of files; None if it cannot be read or its checksum is wrong."""
    try:
        manifest = json.loads(_read_plain(folder / MANIFEST))
        checksum = manifest.pop("checksum")
        good = checksum == digest_of(manifest) and isinstance(manifest["step"], int)
        return {name: value for name, value in manifest.items() if name != "files"} if good else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def fsync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a checksum of plain values that does not depend on their order."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _odd_facts(manifest: Mapping[str, Any], step: int | None) -> list[str]:
    version = manifest.get("format_version")
    odd = [] if version == FORMAT_VERSION else [f"{MANIFEST}: its format_version is {version!r}, not {FORMAT_VERSION}"]
    if step is not None and manifest.get("step") != step:
        odd.append(f"{MANIFEST}: is of step {manifest.get('step')!r}")
    return odd


def _is_name(name: str) -> bool:
    """Return whether this names a file in the folder, or in a folder inside it, and not the manifest."""
    parts = name.split("/")
    return name != MANIFEST and len(parts) <= _DEEPEST and not {"", ".", ".."} & set(parts) and "\0" not in name


def _entries(folder: Path) -> list[Path]:
    """Return everything in the folder and its sub-folders except folders; links are not followed."""
    found = []
    for place, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(place, name).is_symlink()]
        found += [Path(place, name) for name in (*files, *links)]
    return sorted(found)


def _folders(folder: Path) -> list[Path]:
    """Return the sub-folders, the innermost first."""
    return [Path(place) for place, _, _ in os.walk(folder, topdown=False, onerror=_raise) if Path(place) != folder]


def _raise(error: OSError) -> None:
    raise error


def _behind_links(folder: Path, names: Iterable[str]) -> set[str]:
    """Return the names whose path goes through a link."""
    return {name for name in names for above in [*PurePosixPath(name).parents][:-1] if (folder / above).is_symlink()}


def _file_problem(folder: Path, name: str, facts: Mapping[str, Any], light: bool) -> str | None:
    try:
        with _open_plain(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != facts.get("bytes"):
                return f"{name}: {size} bytes, the manifest says {facts.get('bytes')}"
            if light and size > _LIGHT_BYTES:
                return None
            return None if _digest(file) == facts.get("xxh3_128") else f"{name}: does not match its checksum"
    except OSError as error:
        return f"{name}: is missing or no plain file ({error.strerror})"


def _open_plain(path: Path) -> BinaryIO:
    """Open a plain file; OSError for a link, a pipe, a device or a folder, without waiting on any."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(None, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def _read_plain(path: Path) -> str:
    with _open_plain(path) as file:
        data = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(data) > _MOST_MANIFEST_BYTES:
        raise ValueError(f"more than {_MOST_MANIFEST_BYTES} bytes")
    return data.decode("utf-8")


def _checksum(path: Path) -> str:
    with _open_plain(path) as file:
        return _digest(file)


def _digest(file: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
