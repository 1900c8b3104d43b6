"""Checkpoint folders: staged beside their place, synced, sealed by a manifest of checksums, then renamed.

`checkpoint-00001234/` holds tensors as safetensors and everything else as JSON; `MANIFEST.json` is written last and
carries a checksum of itself. The newest checkpoint is the one with the highest step that verifies: no time stamp, no
link and no clock takes part in the decision.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from whet.errors import StorageError
from whet.log import logger

MANIFEST = "MANIFEST.json"
SCHEMA = 1
_NAME = re.compile(r"checkpoint-(\d{8,})")
_CHUNK_BYTES = 1 << 22


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step:08d}"


def save(output_dir: Path, step: int, write: Callable[[Path], None], facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint: `write(folder)` puts the files down; the folder appears under its name only when whole.

    Raises StorageError (exit 74) where the disk refuses; the staging folder is removed, earlier checkpoints stay.
    """
    target = output_dir / folder_name(step)
    staging = output_dir / f".{target.name}.partial"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write(staging)
        _seal(staging, step, facts)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
        _sync(output_dir)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            what=f"the checkpoint of step {step} cannot be written",
            got=str(error),
            why="a checkpoint counts only when all of it is on the disk; earlier ones are untouched",
            fix=f"free space on the disk of --output_dir {output_dir}, or lower --save_total_limit",
        ) from error
    finally:  # whatever ended the writing
        shutil.rmtree(staging, ignore_errors=True)
    return target


def problems_of(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint folder, one line each; empty when every byte is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        seal = manifest.pop("checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: {error or type(error).__name__}"]
    if seal != _digest_of(manifest):
        return [f"{MANIFEST}: does not match its own checksum"]
    if _NAME.fullmatch(folder.name) and manifest.get("step") != step_of(folder):
        return [f"{MANIFEST}: is of step {manifest.get('step')}"]
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    odd = [f"{name}: is not in the manifest" for name in sorted(present - set(files))]
    return odd + [line for name, facts in files.items() if (line := _file_problem(folder / name, facts))]


def newest(output_dir: Path) -> Path | None:
    """Return the checkpoint with the highest step that verifies; the log names each damaged one passed over."""
    for folder in reversed(every(output_dir)):
        problems = problems_of(folder)
        if not problems:
            return folder
        logger.warning("%s is damaged and was passed over: %s", folder, "; ".join(problems[:3]))
    return None


def require_good(folder: Path) -> Path:
    """Return the folder if it verifies; raises StorageError otherwise."""
    problems = problems_of(folder)
    if problems:
        raise StorageError(
            what=f"{folder} is no whole checkpoint",
            got="; ".join(problems[:5]),
            why="every file must have the size and the checksum that its manifest names",
            fix="use --resume_from_checkpoint auto, which takes the newest checkpoint that verifies",
        )
    return folder


def every(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest step first, whole or not."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint folder's name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def rotate(folders: Sequence[Path], keep: int | None, protected: Path | None) -> None:
    """Remove the oldest of one run's checkpoints beyond `keep`; the protected one and the newest always stay.

    `folders` are the checkpoints of the run, oldest step first.
    """
    if keep is None:
        return
    kept = {path.name for path in folders[-max(keep, 1) :]}
    if protected is not None and protected.name not in kept and 1 < keep <= len(folders):
        kept.discard(folders[-keep].name)  # the best one takes a place among the kept, as in transformers
    if protected is not None:
        kept.add(protected.name)
    for folder in folders:
        if folder.name not in kept:
            shutil.rmtree(folder)


def remove_all(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run; the log says how many there were."""
    folders = every(output_dir)
    for folder in folders:
        shutil.rmtree(folder)
    if folders:
        logger.info("removed %d checkpoints of an earlier run from %s", len(folders), output_dir)


def _seal(staging: Path, step: int, facts: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(staging.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
    manifest = {"schema": SCHEMA, "step": step, **facts, "files": files}
    text = json.dumps(manifest | {"checksum": _digest_of(manifest)}, indent=2, sort_keys=True)
    (staging / MANIFEST).write_text(text + "\n", "utf-8")
    _sync(staging / MANIFEST)
    _sync(staging)


def _file_problem(path: Path, facts: Mapping[str, Any]) -> str | None:
    if path.is_symlink() or not path.is_file():
        return f"{path.name}: is missing or no plain file"
    size = path.stat().st_size
    if size != facts.get("bytes"):
        return f"{path.name}: {size} bytes, the manifest says {facts.get('bytes')}"
    return None if _checksum(path) == facts.get("xxh3_128") else f"{path.name}: does not match its checksum"


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
