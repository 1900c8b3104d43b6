"""The checkpoint folders of `whet.Trainer`: the file names of transformers, without pickles, complete or absent.

transformers' Trainer writes a checkpoint file by file into its final folder, and the optimizer, the schedule and the
random states as pickles. Here it writes into a hidden folder, which is synced, sealed by `MANIFEST.json` and renamed;
states are `NAME.json`, with their tensors in `NAME.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.config.ranks import restarted
from whet.errors import StorageError
from whet.hf import between_ranks
from whet.store import find, schema, state, write
from whet.store.state import State

OPTIMIZER, SCHEDULER, SCALER, RANDOM = "optimizer", "scheduler", "scaler", "rng_state"


def read_state(folder: Path, name: str) -> State | None:
    """Return the state of this name; None if there is none. Raises StorageError for one that is damaged."""
    try:
        return state.read_state(folder, name)
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(
            what=f"{folder / name}.json cannot be read",
            got=f"{type(error).__name__}: {error}"[:300],
            why="its text and its tensors are written together",
            fix="resume from an earlier checkpoint",
        ) from error


class Folders:
    """The checkpoints of one training in an output folder; rank 0 writes, and all ranks learn what became of it."""

    def __init__(self, output_dir: Path, resumed_from: Path | None, *, is_first: bool) -> None:
        self.output_dir, self.is_first = output_dir, is_first
        begins = resumed_from is None
        self.lineage = find.new_lineage() if begins else find.lineage_after_resume(resumed_from, output_dir)

    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> Path:
        """Publish the checkpoint of this step, which `fill(folder)` writes on every rank; return its folder.

        Raises StorageError on every rank if it cannot be written; earlier checkpoints are untouched then.
        """
        target, failed = self.output_dir / find.folder_name(step), f"the checkpoint of step {step} was not saved"
        staged: write.Staged | None = None
        with between_ranks.together(failed):
            if self.is_first:
                staged = write.Staged(self.output_dir, step, self.lineage)
        # An error of another rank leaves the folder, which the next training removes.
        with between_ranks.together(failed):
            fill(find.hidden(target, "partial")) if staged is None else staged.put(fill)
        with between_ranks.together(failed):
            if staged is not None:
                staged.put(_lift)
                staged.publish(facts)
        return target

    def own(self) -> list[Path]:
        """Return the checkpoints of this training and of those that it resumed from, oldest step first."""
        return find.of_lineage(find.list_all(self.output_dir), self.lineage)


def _lift(folder: Path) -> None:
    """Move the files of the folder that transformers has named for the step up into the staging folder."""
    for inside in [path for path in folder.iterdir() if path.is_dir() and find.NAME.fullmatch(path.name)]:
        for path in inside.iterdir():
            path.rename(folder / path.name)
        inside.rmdir()


def folder_to_resume(asked: str | bool | None, output_dir: Path, *, is_first: bool) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank; None: the training begins at its first step.

    True, "auto", and a restart by the launcher take the newest intact one of `output_dir`; True raises ValueError if
    there is none, as in transformers. Raises StorageError for a folder that is damaged, that holds the model alone or
    that whet has not written.
    """
    if asked in (None, False) and restarted():
        asked = "auto"
    found: str | None = None

    def look() -> None:
        nonlocal found
        write.clean_up(output_dir)
        if isinstance(asked, str) and asked != "auto" and not Path(asked).is_dir():
            raise ValueError(f"Can't find a valid checkpoint at {asked}")  # transformers' own words
        folder = find.to_resume(asked, output_dir)
        if folder is None and asked is True:
            raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
        found = None if folder is None else str(folder)

    with between_ranks.together("no checkpoint was found to resume from"):
        if is_first:
            look()
    found = between_ranks.of_first(found, schema.optional(schema.text))
    return None if found is None else Path(found)
