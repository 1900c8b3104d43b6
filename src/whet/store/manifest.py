"""The seal of a checkpoint folder: `MANIFEST.json` names every file with its size and checksum, and seals itself.

Nothing here follows a link, waits on a pipe or leaves the folder: a folder from another source may hold anything.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from whet.system import follow_umask, fsync, open_plain, rename

MANIFEST = "MANIFEST.json"
ONLY_MODEL = "only_model"
"""The fact of a checkpoint that no run can resume from."""
BEGINS_WITH, WEIGHTS, FINISHED = "begins_with", "weights", "finished"
"""Facts: checksums of the weights that the run began with and of those it holds, and whether the run ended with it."""
ENDED = "ended"
"""The fact of the last checkpoint of a training that has ended: its last step, and the steps that it was to take."""
FORMAT_VERSION = 2
_CHUNK_BYTES = 1 << 22
_DEEPEST = 8
"""Most parts of a file's name: tokenizers and processors write to sub-folders, one level deep."""
_MOST_MANIFEST_BYTES = 16 << 20
_LIGHT_BYTES = 1 << 16
"""Files up to this size are read completely even with `light`."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a manifest of any content may raise."""


def seal(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Sync every file of the folder to disk, then the manifest that lists them, then the folder itself."""
    files = {}
    paths, folders = _inside(folder)
    for path in paths:
        follow_umask(path)
        fsync(path)
        name = path.relative_to(folder).as_posix()
        if not _is_name(name):
            raise OSError(None, f"{name!r} is not a file name that a checkpoint may hold")
        with _open_plain(path) as file:
            files[name] = _listed(file)
    for path in folders:
        fsync(path) if any(path.iterdir()) else path.rmdir()
    _write(folder, {**facts, "format_version": FORMAT_VERSION, "step": step, "files": files})
    fsync(folder / MANIFEST)
    fsync(folder)


def relist(folder: Path, name: str) -> None:
    """Let the manifest list a file of the folder as it is now; the manifest becomes a new file, in place of a link."""
    manifest = _read(folder)
    with _open_plain(folder / name) as file:
        manifest["files"][name] = _listed(file)
    (folder / MANIFEST).unlink()
    _write(folder, manifest)


def note(folder: Path, **facts: Any) -> None:
    """Add facts to the manifest of a sealed folder; it is replaced at once, and has all of them or none."""
    manifest = _read(folder) | facts
    staged = folder.with_name(f".{folder.name}.partial")  # which the next training removes if this one is killed
    staged.mkdir()
    try:
        (staged / MANIFEST).write_text(_text_of(manifest), "utf-8")
        fsync(staged / MANIFEST)
        rename(staged / MANIFEST, folder / MANIFEST, replaces=True)
        fsync(folder)
    finally:
        (staged / MANIFEST).unlink(missing_ok=True)
        staged.rmdir()


def problems_of(folder: Path, step: int | None = None, *, light: bool = False) -> list[str]:
    """Return what is wrong with a sealed folder, one line each; empty if every byte is as written.

    `step` is the step that the manifest must have. `light` compares the sizes of large files, not their content.
    """
    try:
        manifest = _read(folder)
        files: dict[str, dict[str, Any]] = manifest["files"]
        version = manifest.get("format_version")
        odd = [f"{name!r}: is not a file name" for name in files if not _is_name(name)]
        if version != FORMAT_VERSION:
            odd.append(f"{MANIFEST}: its format_version is {version!r}, not {FORMAT_VERSION}")
        if step is not None and manifest["step"] != step:
            odd.append(f"{MANIFEST}: is of step {manifest['step']!r}")
        if odd:
            return odd
        paths, folders = _inside(folder)
        present = {path.relative_to(folder).as_posix() for path in (*paths, *folders)} - {MANIFEST}
        known = {str(part) for name in files for part in (name, *PurePosixPath(name).parents)}
        odd = [f"{name}: is not in the manifest" for name in sorted(present - known)]
        return odd + [line for name, facts in files.items() if (line := _file_problem(folder, name, facts, light))]
    except _UNREADABLE as error:
        return [f"{MANIFEST}: {error or type(error).__name__}"]


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest without its list of files; None if it cannot be read or its checksum is wrong."""
    try:
        return {name: value for name, value in _read(folder).items() if name != "files"}
    except _UNREADABLE:
        return None


def sealed_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the name, size in bytes and checksum of each file that the manifest lists; nothing if it is damaged."""
    try:
        return {name: (one["bytes"], one["xxh3_128"]) for name, one in _read(folder)["files"].items()}
    except _UNREADABLE:
        return {}


def holds_only_model(folder: Path) -> bool:
    """Return whether the checkpoint was written with save_only_model, so that no run can resume from it."""
    return (facts_of(folder) or {}).get(ONLY_MODEL) is True


def n_ranks_of(folder: Path) -> int:
    """Return how many ranks trained the run that wrote this checkpoint."""
    return int((facts_of(folder) or {}).get("n_ranks", 1))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a checksum of plain values that does not depend on their order."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _listed(file: BinaryIO) -> dict[str, Any]:
    """Return what the manifest says of a file."""
    return {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": _digest(file)}


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(_text_of(manifest), "utf-8")


def _text_of(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, "checksum": digest_of(manifest)}, indent=2, sort_keys=True) + "\n"


def _read(folder: Path) -> dict[str, Any]:
    """Return the manifest without its checksum; raises one of _UNREADABLE if it is not as written."""
    with _open_plain(folder / MANIFEST) as file:
        data = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(data) > _MOST_MANIFEST_BYTES:
        raise ValueError(f"more than {_MOST_MANIFEST_BYTES} bytes")
    manifest = json.loads(data.decode("utf-8"))
    if manifest.pop("checksum") != digest_of(manifest):
        raise ValueError("does not match its own checksum")
    if not isinstance(manifest["step"], int):
        raise ValueError(f"is of step {manifest['step']!r}")
    return manifest


def _is_name(name: str) -> bool:
    """Return whether this names a file in the folder, or in a folder inside it, and not the manifest."""
    parts = name.split("/")
    return name != MANIFEST and len(parts) <= _DEEPEST and not {"", ".", ".."} & set(parts) and "\0" not in name


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files and links in the folder, and its sub-folders, the innermost first; links are not followed."""
    files, folders = [], []
    for place, inner, names in os.walk(folder, onerror=_raise):
        links = [name for name in inner if Path(place, name).is_symlink()]
        files += [Path(place, name) for name in (*names, *links)]
        folders += [Path(place, name) for name in inner if name not in links]
    return sorted(files), folders[::-1]


def _raise(error: OSError) -> None:
    raise error


def _file_problem(folder: Path, name: str, facts: Mapping[str, Any], light: bool) -> str | None:
    if any((folder / above).is_symlink() for above in [*PurePosixPath(name).parents][:-1]):
        return f"{name}: lies behind a link"
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
    handle = open_plain(path, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(None, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def _digest(file: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
