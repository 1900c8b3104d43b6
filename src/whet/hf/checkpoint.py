"""The checkpoint folders of `whet.Trainer`: the file names of transformers, without pickles, complete or absent.

transformers' Trainer writes a checkpoint file by file into its final folder, and the optimizer, the schedule and the
random states as pickles. Here it writes into a hidden folder, which is synced, sealed by `MANIFEST.json` and renamed;
states are `NAME.json`, with their tensors in `NAME.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.config.ranks import restarted
from whet.errors import ConfigError, StorageError
from whet.hf import between_ranks
from whet.log import logger
from whet.paths import utf8_name
from whet.train.checkpoint import content, finding, manifest, on_disk, staging
from whet.train.checkpoint.lineage import new_lineage, read_checkpoints
from whet.train.resume import not_resumable, schema
from whet.train.state import State, join, split

OPTIMIZER, SCHEDULER, SCALER, RANDOM = "optimizer", "scheduler", "scaler", "rng_state"


def write_state(folder: Path, name: str, state: State) -> None:
    """Write a state of JSON values and tensors as NAME.json and NAME.safetensors."""
    plain, tensors = split(state)
    (folder / f"{name}.json").write_text(_json(name, plain), "utf-8")
    if tensors:
        content.write_tensors({name: tensors}, folder)


def read_state(folder: Path, name: str) -> State | None:
    """Return what `write_state` wrote; None if there is no such state. Raises StorageError for one that is damaged."""
    text, tensors = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not text.is_file():
        return None
    try:
        with utf8_name(folder) as named:
            found = load_file(named / tensors.name) if tensors.is_file() else {}
        return join(json.loads(text.read_text("utf-8")), found)
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(
            what=f"{text} cannot be read",
            got=f"{type(error).__name__}: {error}"[:300],
            why="its text and its tensors are written together",
            fix="resume from an earlier checkpoint",
        ) from error


def _json(name: str, plain: Any) -> str:
    try:
        return json.dumps(plain, indent=1) + "\n"
    except TypeError as error:
        raise ConfigError(
            what=f"the state of the {name} cannot be written",
            got=str(error),
            why="checkpoints hold plain numbers, texts and tensors: they can be read without running code",
            fix=f"change what the {name} returns as its state_dict(), or use save_only_model=True",
        ) from error


class Folders:
    """The checkpoints of one training in an output folder; rank 0 writes, and all ranks learn what became of it."""

    def __init__(self, output_dir: Path, resumed_from: Path | None, *, is_first: bool) -> None:
        self.output_dir, self.is_first = output_dir, is_first
        own = new_lineage() if resumed_from is None else finding.lineage_after_resume(resumed_from, output_dir)
        self.lineage = own

    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> Path:
        """Publish the checkpoint of this step, which `fill(folder)` writes on every rank; return its folder.

        Raises StorageError on every rank if it cannot be written; earlier checkpoints are untouched then.
        """
        target, failed = self.output_dir / on_disk.folder_name(step), f"the checkpoint of step {step} was not saved"
        staged: staging.Staged | None = None
        with between_ranks.together(failed):
            if self.is_first:
                staged = staging.Staged(self.output_dir, step, self.lineage)
        # An error of another rank leaves the folder, which the next training removes.
        with between_ranks.together(failed):
            fill(on_disk.hidden(target, "partial")) if staged is None else staged.put(fill)
        with between_ranks.together(failed):
            if staged is not None:
                staged.put(_lift)
                staged.publish(facts)
        return target

    def own(self) -> list[Path]:
        """Return the checkpoints of this training and of those that it resumed from, oldest step first."""
        found = read_checkpoints(on_disk.list_all(self.output_dir))
        return [one.folder for one in found if self.lineage.includes(one.lineage.run, one.step)]


def _lift(folder: Path) -> None:
    """Move the files of the folder that transformers has named for the step up into the staging folder."""
    for inside in [path for path in folder.iterdir() if path.is_dir() and on_disk.NAME.fullmatch(path.name)]:
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

    def find() -> None:
        nonlocal found
        staging.clean_up(output_dir)
        if asked in (None, False):
            return
        if asked is True or asked == "auto":
            newest = finding.newest(output_dir)
            if newest is None and asked is True:
                raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
            folder = newest
        elif not Path(str(asked)).is_dir():
            raise ValueError(f"Can't find a valid checkpoint at {asked}")  # transformers' own words
        else:
            folder = finding.require_intact(Path(str(asked)))
        if folder is not None and manifest.holds_only_model(folder):
            raise not_resumable.only_model(folder, None)
        found = None if folder is None else str(folder)

    with between_ranks.together("no checkpoint was found to resume from"):
        if is_first:
            find()
    found = between_ranks.of_first(found, schema.optional(schema.text))
    if found is None and asked == "auto":
        logger.info("there is no checkpoint in %s: the training begins at its first step", output_dir)
    return None if found is None else Path(found)
