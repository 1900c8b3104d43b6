"""The folders of checkpoints on the disk: their names, which are there, and how they are removed.

`checkpoint-1234/` is a checkpoint, `abandoned-ID/` holds those that a run left when it went back to an older one. A
folder is renamed to a hidden name before it is deleted, so no half-deleted folder has the name of a checkpoint.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from whet.log import logger
from whet.train.checkpoint import manifest
from whet.train.checkpoint.lineage import Checkpoint

NAME = re.compile(r"checkpoint-(\d{1,18})")
HIDDEN = re.compile(r"\.(checkpoint-\d{1,18})\.(partial|replaced|removed)")
MODEL_STAGING = ".model.partial"
"""Where a model is written before its files are moved to the output folder."""
ASIDE = "abandoned"
"""Prefix of the folders for checkpoints that a run abandoned when it went back to an older one."""


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint folder's name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def list_all(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest step first, complete or not."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def problems_of(folder: Path, *, light: bool = False) -> list[str]:
    """Return what is wrong with a checkpoint folder, one line each; empty if every byte is as written.

    `light` compares the sizes of large files, not their content.
    """
    if not folder.is_dir():
        return ["there is no such folder"]
    return manifest.problems_of(folder, step_of(folder) if NAME.fullmatch(folder.name) else None, light=light)


def rotate(folders: Sequence[Path], keep: int | None, protected: Path | None) -> None:
    """Remove the oldest checkpoints of one run beyond `keep`; the protected one and the newest always stay.

    `folders` are the checkpoints of the run, oldest step first. What cannot be removed stays, with a warning.
    """
    if keep is None:
        return
    folders = sorted(folders, key=step_of)
    kept = {path.name for path in folders[-max(keep, 1) :]}
    if protected is not None and protected.name not in kept and 1 < keep <= len(folders):
        kept.discard(folders[-keep].name)  # the best one counts towards `keep`, as in transformers
    if protected is not None:
        kept.add(protected.name)
    for folder in folders:
        if folder.name not in kept:
            remove(folder)


def remove_all(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run, with its abandoned ones; the log says how many."""
    aside = aside_folders(output_dir)
    folders = [path for place in (output_dir, *aside) for path in list_all(place)]
    for folder in folders:
        remove(folder)
    for place in aside:
        remove_if_empty(place)
    if folders:
        logger.info("removed %d checkpoints of an earlier run from %s", len(folders), output_dir)


def aside_folders(output_dir: Path) -> list[Path]:
    """Return the folders that hold abandoned checkpoints."""
    found = [path for path in output_dir.glob(f"{ASIDE}-*") if path.is_dir() and not path.is_symlink()]
    return sorted(found)


def abandoned_path(one: Checkpoint) -> Path:
    """Return the new path of an abandoned checkpoint: in a folder named for its lineage, and not yet taken."""
    base = one.folder.with_name(f"{ASIDE}-{one.lineage.name}")
    for number in itertools.count(1):
        place = base if number == 1 else base.with_name(f"{base.name}-{number}")
        free = not os.path.lexists(place) or (place.is_dir() and not place.is_symlink())
        if free and not os.path.lexists(place / one.folder.name):
            return place / one.folder.name
    raise AssertionError


def hidden(folder: Path, state: str) -> Path:
    """Return the hidden name of a checkpoint folder that is partial, replaced or removed."""
    return folder.with_name(f".{folder.name}.{state}")


def remove(folder: Path) -> None:
    """Remove a checkpoint; what cannot be removed stays, with a warning."""
    out_of_sight = hidden(folder, "removed")
    remove_leftover(out_of_sight)
    try:
        folder.rename(out_of_sight)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)
        return
    delete(out_of_sight)


def remove_leftover(place: Path) -> None:
    """Remove a leftover folder. Anything else stays (rmtree would wait on a pipe), and the save fails."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def delete(folder: Path) -> None:
    """Delete a hidden folder; what cannot be deleted now is deleted when the next run begins."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder for abandoned checkpoints once it holds none."""
    if folder.name.startswith(f"{ASIDE}-"):
        with suppress(OSError):
            folder.rmdir()
