"""Checkpoint folders: written to a staging folder, synced, sealed by a manifest of checksums, then renamed.

`checkpoint-00001234/` holds tensors as safetensors and everything else as JSON. `MANIFEST.json` is written last and
holds a checksum of itself. The newest checkpoint is the intact one with the highest step; time stamps, links and clocks
do not matter. If a run goes back to an older checkpoint, the later ones of the lineage that it leaves are moved to
`abandoned-ID/`, and only used if the user names them. A folder is renamed to a hidden name before it is deleted, so no
half-deleted folder has the name of a checkpoint.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import manifest
from whet.train.checkpoint.lineage import Checkpoint, Lineage, abandoned, read_checkpoints
from whet.train.checkpoint.manifest import fsync
from whet.train.output import disk_errors
from whet.train.resume import not_resumable

MANIFEST = manifest.MANIFEST
_NAME = re.compile(r"checkpoint-(\d{8,18})")
MODEL_STAGING = ".model.partial"
"""Where a model is written before its files are moved to the output folder."""
_MOST_NAMED = 3
_ASIDE = "abandoned"
"""Prefix of the folders for checkpoints that a run abandoned when it went back to an older one."""
_HIDDEN = re.compile(r"\.(checkpoint-\d{8,18})\.(partial|replaced|removed)")


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step:08d}"


def save(
    output_dir: Path,
    step: int,
    write: Callable[[Path], None],
    facts: Mapping[str, Any],
    lineage: Lineage | None = None,
) -> Path:
    """Write a checkpoint: `write(folder)` writes the files; the folder gets its name only when it is complete.

    Raises StorageError (exit 74) if writing fails; the staging folder is removed, earlier checkpoints stay.
    """
    staged = Staged(output_dir, step, lineage)
    staged.put(write)
    return staged.publish(facts)


class Staged:
    """A checkpoint that is being written, under a hidden name until it is published. An error removes it."""

    def __init__(self, output_dir: Path, step: int, lineage: Lineage | None = None) -> None:
        """Publishing moves checkpoints aside that do not belong to `lineage`, unless it is None."""
        self.step = step
        self.lineage = lineage
        self.target = output_dir / folder_name(step)
        self._staging = _hidden(self.target, "partial")
        self._replaced = _hidden(self.target, "replaced")
        self._moved: list[tuple[Path, Path]] = []
        with self._all_or_nothing():
            self._make_room(output_dir)

    def put(self, write: Callable[[Path], None]) -> None:
        """Call `write(folder)`, which writes files to the staging folder."""
        with self._all_or_nothing():
            write(self._staging)

    def publish(self, facts: Mapping[str, Any], written_by: Lineage | None = None) -> Path:
        """Seal the files and rename the folder; return it after the files were read back and are intact.

        An older checkpoint of the same step is moved aside, and deleted only after every byte of the new one was read.
        """
        origin = written_by or self.lineage
        content = {**facts, **(origin.facts() if origin else {})}
        with self._all_or_nothing():
            manifest.seal(self._staging, self.step, content)
            aside = self._set_others_aside()
            replaces = self.target.is_dir() and not self.target.is_symlink()
            if replaces:
                self._move(self.target, self._replaced)
            self._move(self._staging, self.target)
            fsync(self.target.parent.resolve())  # the folder may be named by a link; nothing in it may be one
            if problems := manifest.problems_of(self.target, self.step, light=not replaces):
                raise OSError("; ".join(problems))
        if replaces:
            _delete(self._replaced)
        if aside:
            logger.warning(
                "the checkpoints that this run abandoned by going back are kept, but auto never resumes from them: %s",
                ", ".join(map(str, aside)),
            )
        return self.target

    def _set_others_aside(self) -> list[Path]:
        """Move the checkpoints of other lineages into folders named for these, and return their new paths.

        The highest step is moved last: if this is interrupted, the newest checkpoint is that of the old lineage or the
        parent.
        """
        if self.lineage is None:
            return []
        found = []
        for one in read_checkpoints(list_all(self.target.parent)):
            if not self.lineage.includes(one.lineage.run, one.step):
                place = _abandoned_path(one)
                place.parent.mkdir(exist_ok=True)
                self._move(one.folder, place)
                fsync(place.parent)
                fsync(self.target.parent.resolve())
                found.append(place)
        return found

    def _make_room(self, output_dir: Path) -> None:
        if not output_dir.is_dir():
            output_dir.mkdir(parents=True)
            fsync(output_dir.parent.resolve())
        _remove_leftover(self._staging)
        finish_replacement(self.target)
        self._staging.mkdir()

    def _move(self, old: Path, new: Path) -> None:
        old.rename(new)
        self._moved.append((old, new))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for old, new in reversed(self._moved):
                with suppress(OSError):
                    new.rename(old)
                    _remove_if_empty(new.parent)
            _remove_leftover(self._staging)
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise StorageError(
                what=f"the checkpoint of step {self.step} cannot be written",
                got=str(error),
                why="a checkpoint counts only when all of it is on the disk; earlier ones are untouched",
                fix=f"{disk_errors.fix(error, self.target.parent)}; --save_total_limit keeps fewer checkpoints, and "
                "--save_error_policy continue trains without this one",
            ) from error


def problems_of(folder: Path, *, light: bool = False) -> list[str]:
    """Return what is wrong with a checkpoint folder, one line each; empty if every byte is as written.

    `light` compares the sizes of large files, not their content.
    """
    if not folder.is_dir():
        return ["there is no such folder"]
    return manifest.problems_of(folder, step_of(folder) if _NAME.fullmatch(folder.name) else None, light=light)


def newest(output_dir: Path) -> Path | None:
    """Return the intact checkpoint with the highest step; the log names each damaged one that was skipped.

    None if there is no checkpoint at all. Raises StorageError if there are checkpoints, but none is intact.
    """
    folders = list_all(output_dir)
    left = abandoned(folders)
    for folder in reversed(folders):
        if folder in left:
            logger.warning("%s was passed over: the run went back to before it; name it to resume from it", folder)
            continue
        problems = problems_of(folder)
        if not problems:
            return folder
        logger.warning(
            "%s is damaged and was passed over, the checkpoint before it is tried: %s", folder, "; ".join(problems[:3])
        )
    if not folders:
        not_resumable.require_not_of_transformers(output_dir)
        return None
    raise StorageError(
        what=f"none of the {len(folders)} checkpoints in {output_dir} is complete",
        got=f"the newest {min(_MOST_NAMED, len(folders))}: "
        + "; ".join(f"{folder.name}: {problems_of(folder)[0]}" for folder in folders[: -_MOST_NAMED - 1 : -1]),
        why="a run that should resume never starts from the beginning by itself",
        fix="put a complete checkpoint back; or start a new run: leave --resume_from_checkpoint out and use another "
        "--output_dir (or --overwrite_output_dir, which deletes these checkpoints)",
    )


def copy(folder: Path, output_dir: Path, lineage: Lineage) -> Path:
    """Copy an intact checkpoint to the output folder of a run that resumed from it; return the copy."""
    (there,) = read_checkpoints([folder])

    def write(staging: Path) -> None:
        shutil.copytree(folder, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))

    known = manifest.facts_of(folder) or {}
    facts = {name: value for name, value in known.items() if name not in ("step", "run", "parents")}
    staged = Staged(output_dir, there.step, lineage)
    staged.put(write)
    return staged.publish(facts, there.lineage)


def lineage_after_resume(folder: Path, output_dir: Path) -> Lineage:
    """Return the lineage of a run that resumes from this checkpoint and saves to `output_dir`.

    It is that of the checkpoint if that is the newest one there, and a new one otherwise.
    """
    found = read_checkpoints([folder])
    own = (
        found[0] if found else Checkpoint(folder, step_of(folder) if _NAME.fullmatch(folder.name) else 0, Lineage(None))
    )
    there = list_all(output_dir)
    left = abandoned(there)
    later = [path for path in there if path not in left and step_of(path) > own.step]
    stays = folder.resolve().parent == output_dir.resolve() and all(problems_of(path) for path in later)
    return own.lineage if stays and own.lineage.run is not None else own.lineage.branched(own.step)


def would_resume(output_dir: Path) -> Path | None:
    """Return the checkpoint that "auto" would take, without reading large files; None if there is none."""
    folders = list_all(output_dir)
    left = abandoned(folders)
    return next((path for path in reversed(folders) if path not in left and not problems_of(path, light=True)), None)


def find(name: str, lineage: Lineage, places: Sequence[Path]) -> Path | None:
    """Return the checkpoint of this name and lineage in these folders, or in their folders of abandoned ones."""
    if not _NAME.fullmatch(name):
        return None
    folders = [folder / name for place in places for folder in (place, *_set_aside_in(place))]
    there = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    return next((one.folder for one in read_checkpoints(there) if lineage.includes(one.lineage.run, one.step)), None)


def require_intact(folder: Path, *, light: bool = False) -> Path:
    """Return the folder if it is intact; raises StorageError otherwise."""
    problems = problems_of(folder, light=light)
    if problems:
        raise not_resumable.error(folder, problems, _instead_of(folder))
    return folder


def require_complete(folder: Path) -> Path:
    """Return the folder if a run can resume from it; raises StorageError if it holds the model alone."""
    if manifest.holds_only_model(folder):
        raise not_resumable.only_model(folder, _instead_of(folder))
    return folder


def _instead_of(folder: Path) -> Path | None:
    """Return an intact checkpoint in the folder itself, or next to it."""
    there = [path for place in (folder, folder.parent) for path in reversed(list_all(place)) if path != folder]
    left = abandoned(there)
    return next(
        (one for one in there if one not in left and not manifest.holds_only_model(one) and not problems_of(one)), None
    )


def list_all(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest step first, complete or not."""
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
            _remove(folder)


def remove_all(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run, with its abandoned ones; the log says how many."""
    aside = _set_aside_in(output_dir)
    folders = [path for place in (output_dir, *aside) for path in list_all(place)]
    for folder in folders:
        _remove(folder)
    for place in aside:
        _remove_if_empty(place)
    if folders:
        logger.info("removed %d checkpoints of an earlier run from %s", len(folders), output_dir)


def clean_up(output_dir: Path) -> None:
    """Remove what a killed run left half written or half deleted, and finish or undo a replacement."""
    if not output_dir.is_dir():
        return
    for path in sorted(output_dir.iterdir()):
        if path.name == MODEL_STAGING and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        match = _HIDDEN.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if match.group(2) == "replaced":
            finish_replacement(output_dir / match.group(1))
        else:
            shutil.rmtree(path, ignore_errors=True)


def finish_replacement(place: Path) -> None:
    """Finish a replacement that a kill interrupted: keep the new checkpoint if it is intact, else the old one.

    If both are damaged, the one with the checkpoint's name stays.
    """
    replaced = _hidden(place, "replaced")
    odd = replaced.is_symlink() or place.is_symlink() or (place.exists() and not place.is_dir())
    if odd or not replaced.is_dir():
        return
    with suppress(OSError):  # both stay then, and the next run tries again
        if not problems_of(replaced) and (not place.exists() or problems_of(place)):
            if place.exists():
                _remove(place)
            replaced.rename(place)
        else:
            fsync(place.parent.resolve())  # without it, a power cut could undo the rename after the old one is deleted
            shutil.rmtree(replaced)


def _set_aside_in(output_dir: Path) -> list[Path]:
    """Return the folders that hold abandoned checkpoints."""
    found = [path for path in output_dir.glob(f"{_ASIDE}-*") if path.is_dir() and not path.is_symlink()]
    return sorted(found)


def _abandoned_path(one: Checkpoint) -> Path:
    """Return the new path of an abandoned checkpoint: in a folder named for its lineage, and not yet taken."""
    base = one.folder.with_name(f"{_ASIDE}-{one.lineage.name}")
    for number in itertools.count(1):
        place = base if number == 1 else base.with_name(f"{base.name}-{number}")
        free = not os.path.lexists(place) or (place.is_dir() and not place.is_symlink())
        if free and not os.path.lexists(place / one.folder.name):
            return place / one.folder.name
    raise AssertionError


def _remove_if_empty(folder: Path) -> None:
    if folder.name.startswith(f"{_ASIDE}-"):
        with suppress(OSError):
            folder.rmdir()


def _hidden(folder: Path, state: str) -> Path:
    return folder.with_name(f".{folder.name}.{state}")


def _remove(folder: Path) -> None:
    out_of_sight = _hidden(folder, "removed")
    _remove_leftover(out_of_sight)
    try:
        folder.rename(out_of_sight)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)
        return
    _delete(out_of_sight)


def _remove_leftover(place: Path) -> None:
    """Remove a leftover folder. Anything else stays (rmtree would wait on a pipe), and the save fails."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Delete a hidden folder; what cannot be deleted now is deleted when the next run begins."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)
