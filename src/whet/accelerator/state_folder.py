"""The folder of a saved state: it appears complete, with checksums of its files, by one rename."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.errors import ConfigError, StorageError
from whet.train.checkpoint import manifest, on_disk, staging
from whet.train.output import disk_errors

_KIND = "state of whet.Accelerator"


NUMBERED = "checkpoint_"
"""What accelerate names numbered states, with their number."""


def partial_of(target: Path) -> Path:
    """Return where the files of a state are collected until all are there."""
    return on_disk.hidden(target, "partial")


def stage(target: Path) -> None:
    """Make the empty folder in which the files are collected; raises ConfigError if the target holds other files."""
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        on_disk.remove_leftover(partial_of(target))
        staging.finish_replacement(target)
        _require_free(target)
        partial_of(target).mkdir()


def publish(target: Path, write: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Let `write(folder)` add the last files, and give the folder its name once all of them are on the disk."""
    partial, replaced = partial_of(target), on_disk.hidden(target, "replaced")
    with _disk_errors(target):
        write(partial)
        manifest.seal(partial, 0, {**facts, "kind": _KIND})
        if target.is_dir():
            target.rename(replaced)
        partial.rename(target)
        manifest.fsync(target.parent.resolve())
        on_disk.remove_leftover(replaced)


def discard(target: Path) -> None:
    """Remove what was collected, and give an earlier state its name back."""
    on_disk.remove_leftover(partial_of(target))
    staging.finish_replacement(target)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            what=f"the state cannot be written to {target}",
            got=str(error),
            why="a state counts only when all of it is on the disk; an earlier one there is untouched",
            fix=disk_errors.fix(error, target.parent),
        ) from error


def numbered(folder: Path) -> list[Path]:
    """Return the numbered states in this folder, the newest last."""
    there = [path for path in folder.glob(f"{NUMBERED}*") if path.name.removeprefix(NUMBERED).isdigit()]
    return sorted((path for path in there if path.is_dir()), key=number_of)


def number_of(path: Path) -> int:
    """Return the number in a numbered state's name."""
    return int(path.name.removeprefix(NUMBERED))


def keep(folders: Sequence[Path], n_kept: int) -> None:
    """Remove the oldest states but `n_kept`; folders that whet has not written stay."""
    own = [path for path in folders if (manifest.facts_of(path) or {}).get("kind") == _KIND]
    for path in own[: -max(n_kept, 1)]:
        on_disk.remove(path)


def require_intact(folder: Path) -> dict[str, Any]:
    """Return the facts of a saved state; raises StorageError if anything in it is not as it was written."""
    facts = manifest.facts_of(folder) or {}
    if facts.get("kind") != _KIND:
        raise StorageError(
            what=f"{folder} is not a state that whet.Accelerator saved",
            got="no such folder" if not folder.is_dir() else f"files: {', '.join(sorted(_names(folder))[:5])}",
            why="whet reads states of safetensors and JSON files; those of accelerate hold pickle, which can run code",
            fix="name a folder that save_state of whet.Accelerator wrote; or load it with accelerate.Accelerator",
        )
    if problems := manifest.problems_of(folder):
        raise StorageError(
            what=f"the state in {folder} is damaged",
            got="; ".join(problems[:3]),
            why="every file has to be as it was written",
            fix="load an earlier state",
        )
    return facts


def _require_free(target: Path) -> None:
    """Refuse a folder with other files: saving replaces the folder."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OSError(None, "a link or a file of this name is in the way", str(target))
    if not target.exists() or not _names(target):
        return
    if (manifest.facts_of(target) or {}).get("kind") != _KIND or manifest.problems_of(target, light=True):
        raise ConfigError(
            what=f"{target} holds other files than a saved state",
            got=", ".join(sorted(_names(target))[:5]),
            why="save_state replaces the complete folder, and would remove them",
            fix="use a folder of its own for each state, such as states/step-100",
        )


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
