"""Which checkpoint a run resumes from.

The newest checkpoint is the intact one with the highest step; time stamps, links and clocks do not matter. Once a run
has gone back to an older checkpoint, the later ones of the lineage that it left are only used if the user names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import manifest, on_disk
from whet.train.checkpoint.lineage import Checkpoint, Lineage, abandoned, read_checkpoints
from whet.train.resume import not_resumable

_MOST_NAMED = 3


def newest(output_dir: Path) -> Path | None:
    """Return the intact checkpoint with the highest step; the log names each damaged one that was skipped.

    None if there is no checkpoint at all. Raises StorageError if there are checkpoints, but none is intact.
    """
    folders = on_disk.list_all(output_dir)
    left = abandoned(folders)
    for folder in reversed(folders):
        if folder in left:
            logger.warning("%s was passed over: the run went back to before it; name it to resume from it", folder)
            continue
        problems = on_disk.problems_of(folder)
        if not problems:
            return folder
        logger.warning(
            "%s is damaged and was passed over, the checkpoint before it is tried: %s", folder, "; ".join(problems[:3])
        )
    not_resumable.require_not_of_transformers(output_dir)
    if not folders:
        return None
    raise StorageError(
        what=f"none of the {len(folders)} checkpoints in {output_dir} is complete",
        got=f"the newest {min(_MOST_NAMED, len(folders))}: "
        + "; ".join(f"{folder.name}: {on_disk.problems_of(folder)[0]}" for folder in folders[: -_MOST_NAMED - 1 : -1]),
        why="a run that should resume never starts from the beginning by itself",
        fix="put a complete checkpoint back; or start a new run: leave --resume_from_checkpoint out and use another "
        "--output_dir (or, without --max_restarts, --overwrite_output_dir, which deletes these checkpoints)",
    )


def would_resume(output_dir: Path) -> Path | None:
    """Return the checkpoint that "auto" would take, without reading large files; None if there is none."""
    folders = on_disk.list_all(output_dir)
    left = abandoned(folders)
    return next(
        (path for path in reversed(folders) if path not in left and not on_disk.problems_of(path, light=True)), None
    )


def find(name: str, lineage: Lineage, places: Sequence[Path]) -> Path | None:
    """Return the checkpoint of this name and lineage in these folders, or in their folders of abandoned ones."""
    if not on_disk.NAME.fullmatch(name):
        return None
    folders = [folder / name for place in places for folder in (place, *on_disk.aside_folders(place))]
    there = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    return next((one.folder for one in read_checkpoints(there) if lineage.includes(one.lineage.run, one.step)), None)


def require_intact(folder: Path, *, light: bool = False) -> Path:
    """Return the folder if it is intact; raises StorageError otherwise."""
    problems = on_disk.problems_of(folder, light=light)
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
    there = [path for place in (folder, folder.parent) for path in reversed(on_disk.list_all(place)) if path != folder]
    left = abandoned(there)
    return next(
        (
            one
            for one in there
            if one not in left and not manifest.holds_only_model(one) and not on_disk.problems_of(one)
        ),
        None,
    )


def lineage_after_resume(folder: Path, output_dir: Path) -> Lineage:
    """Return the lineage of a run that resumes from this checkpoint and saves to `output_dir`.

    It is that of the checkpoint if that is the newest one there, and a new one otherwise.
    """
    found = read_checkpoints([folder])
    own = (
        found[0]
        if found
        else Checkpoint(folder, on_disk.step_of(folder) if on_disk.NAME.fullmatch(folder.name) else 0, Lineage(None))
    )
    there = on_disk.list_all(output_dir)
    left = abandoned(there)
    later = [path for path in there if path not in left and on_disk.step_of(path) > own.step]
    stays = folder.resolve().parent == output_dir.resolve() and all(on_disk.problems_of(path) for path in later)
    return own.lineage if stays and own.lineage.run is not None else own.lineage.branched(own.step)
