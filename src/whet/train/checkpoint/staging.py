"""Writing a checkpoint folder: to a staging folder, synced, sealed by a manifest of checksums, then renamed.

A checkpoint holds tensors as safetensors and everything else as JSON. `MANIFEST.json` is written last and holds a
checksum of itself. What a kill leaves behind is finished or undone when the next run begins.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.console import amount
from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import content, manifest, on_disk
from whet.train.checkpoint.lineage import Lineage, read_checkpoints
from whet.train.checkpoint.manifest import fsync
from whet.train.output import disk_errors

_TENSORS = ".safetensors"


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
        self.target = output_dir / on_disk.folder_name(step)
        self._staging = on_disk.hidden(self.target, "partial")
        self._replaced = on_disk.hidden(self.target, "replaced")
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
            on_disk.delete(self._replaced)
        try:  # the checkpoint is published: what the disk does not say of others changes nothing in that
            self._tidy_up(aside, facts.get(manifest.BEGINS_WITH))
        except OSError as error:
            logger.warning("what earlier runs have left in %s cannot be read: %s", self.target.parent, error)
        return self.target

    def _tidy_up(self, aside: Sequence[Path], begins_with: str | None) -> None:
        """Remove what is left of earlier runs whose steps others hold, and log what stays of what was moved aside."""
        if self.lineage is not None:
            discard_held(self.target.parent, self.lineage, begins_with)
        kept = [one for one in aside if one.is_dir()]
        if kept:
            logger.warning(
                "checkpoints that this run does not continue are kept, but auto never resumes from them; delete those "
                "that you do not need: %s",
                ", ".join(f"{one} ({amount(_n_bytes(one))})" for one in kept),
            )

    def _set_others_aside(self) -> list[Path]:
        """Move the checkpoints of other lineages into folders named for these, and return their new paths.

        The highest step is moved last: if this is interrupted, the newest checkpoint is that of the old lineage or the
        parent.
        """
        if self.lineage is None:
            return []
        found = []
        for one in read_checkpoints(on_disk.list_all(self.target.parent)):
            if not self.lineage.includes(one.lineage.run, one.step):
                place = on_disk.abandoned_path(one)
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
        on_disk.remove_leftover(self._staging)
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
                    on_disk.remove_if_empty(new.parent)
            on_disk.remove_leftover(self._staging)
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise StorageError(
                what=f"the checkpoint of step {self.step} cannot be written",
                got=str(error),
                why="a checkpoint counts only when all of it is on the disk; earlier ones are untouched",
                fix=f"{disk_errors.fix(error, self.target.parent)}; --save_total_limit keeps fewer checkpoints, and "
                "--save_error_policy continue trains without this one",
            ) from error


def discard_held(output_dir: Path, lineage: Lineage, begins_with: str | None) -> None:
    """Remove what is left of earlier runs whose steps other checkpoints hold; the log says how much.

    Of a run that shares no steps with this one, its last checkpoint and its best stay. They go as well if this run
    holds the same tensors, or if the earlier run had ended and this one began with its weights (`begins_with`).
    """
    removed, n_bytes = 0, 0
    for place in on_disk.aside_folders(output_dir):
        found = read_checkpoints(on_disk.list_all(place))
        there = [one for one in found if not on_disk.problems_of(one.folder, light=True)]
        if not there or any(lineage.shares_steps_with(one.lineage) for one in there):
            continue
        last = max(there, key=lambda one: one.step)
        kept = (
            set() if _is_held(last.folder, output_dir, begins_with) else {last.folder.name, _best_named_in(last.folder)}
        )
        for folder in (one.folder for one in there if one.folder.name not in kept):
            removed, n_bytes = removed + 1, n_bytes + _n_bytes(folder)
            on_disk.remove(folder)
        on_disk.remove_if_empty(place)
    if removed:
        logger.info("removed %d checkpoints of an earlier run (%s): others hold their steps", removed, amount(n_bytes))


def _is_held(last: Path, output_dir: Path, begins_with: str | None) -> bool:
    """Return whether a run holds all that an earlier one, whose last checkpoint this is, came to."""
    facts, own = manifest.facts_of(last) or {}, _tensors(last)
    if facts.get(manifest.FINISHED) and begins_with is not None and facts.get(manifest.WEIGHTS) == begins_with:
        return True
    return any(path.name == last.name and _tensors(path) == own for path in on_disk.list_all(output_dir))


def _best_named_in(folder: Path) -> str | None:
    state = folder / content.TRAINER_STATE
    return json.loads(state.read_text("utf-8")).get("best_model_checkpoint") if state.is_file() else None


def _tensors(folder: Path) -> dict[str, str]:
    """Return the checksum of each file of tensors of a checkpoint."""
    files = manifest.sealed_files(folder)
    return {name: checksum for name, (_, checksum) in files.items() if name.endswith(_TENSORS)}


def _n_bytes(folder: Path) -> int:
    return sum(size for size, _ in manifest.sealed_files(folder).values())


def copy(folder: Path, output_dir: Path, lineage: Lineage) -> Path:
    """Copy an intact checkpoint to the output folder of a run that resumed from it; return the copy."""
    (there,) = read_checkpoints([folder])

    def write(staging: Path) -> None:
        shutil.copytree(folder, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(manifest.MANIFEST))

    known = manifest.facts_of(folder) or {}
    facts = {name: value for name, value in known.items() if name not in ("step", "run", "parents")}
    staged = Staged(output_dir, there.step, lineage)
    staged.put(write)
    return staged.publish(facts, there.lineage)


def clean_up(output_dir: Path) -> None:
    """Remove what a killed run left half written or half deleted, and finish or undo a replacement."""
    if not output_dir.is_dir():
        return
    for path in sorted(output_dir.iterdir()):
        if path.name == on_disk.MODEL_STAGING and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        match = on_disk.HIDDEN.fullmatch(path.name)
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
    replaced = on_disk.hidden(place, "replaced")
    odd = replaced.is_symlink() or place.is_symlink() or (place.exists() and not place.is_dir())
    if odd or not replaced.is_dir():
        return
    with suppress(OSError):  # both stay then, and the next run tries again
        if not on_disk.problems_of(replaced) and (not place.exists() or on_disk.problems_of(place)):
            if place.exists():
                on_disk.remove(place)
            replaced.rename(place)
        else:
            fsync(place.parent.resolve())  # without it, a power cut could undo the rename after the old one is deleted
            shutil.rmtree(replaced)
