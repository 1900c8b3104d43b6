"""The errors for a folder that a run cannot resume from, with what to use instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from whet.errors import StorageError
from whet.train.checkpoint.manifest import MANIFEST

_STATE, _CONFIG, _ADAPTER = "trainer_state.json", "config.json", "adapter_config.json"
_OF_WHET = "state.json"
"""A file that only whet's checkpoints hold."""
_OF_TRANSFORMERS = re.compile(r"checkpoint-(\d{1,18})")
_NEW_RUN = "start a new run: leave --resume_from_checkpoint out and use another --output_dir"


def error(folder: Path, problems: Sequence[str], other: Path | None) -> StorageError:
    """Return the error for a folder with these problems; `other` is a checkpoint that can be resumed from."""
    use = None if other is None else f"--resume_from_checkpoint {shlex.quote(str(other))}"
    if not folder.is_dir():
        return StorageError(
            what=f"{folder} is not a complete checkpoint",
            got="it is a file" if folder.exists() else "there is no such folder",
            why="a checkpoint is a folder named checkpoint-STEP in the --output_dir of a run",
            fix=f"use {use}" if use else f"correct the path in --resume_from_checkpoint; or {_NEW_RUN}",
        )
    if not (folder / MANIFEST).exists():
        return _never_sealed(folder, use)
    return StorageError(
        what=f"{folder} is not a complete checkpoint",
        got="; ".join(problems[:5]),
        why="every file must have the size and the checksum that its manifest names",
        fix=f"use {use}, which is intact" if use else f"copy it again from an intact copy; or {_NEW_RUN}",
    )


def only_model(folder: Path, other: Path | None) -> StorageError:
    """Return the error for a checkpoint without the optimizer; `other` is one that can be resumed from."""
    use = "" if other is None else f"use --resume_from_checkpoint {shlex.quote(str(other))}, which is complete; or "
    return StorageError(
        what=f"{folder} holds only the model",
        got="a checkpoint that was written with save_only_model",
        why="a resumed run needs the state of the optimizer, which this checkpoint does not have",
        fix=f"{use}{_from_weights(folder)}",
    )


def require_not_of_transformers(output_dir: Path) -> None:
    """Raise StorageError if the folder holds checkpoints of transformers, which "auto" would not resume from."""
    if not output_dir.is_dir():
        return
    named = [path for path in output_dir.iterdir() if _OF_TRANSFORMERS.fullmatch(path.name)]
    found = [path for path in named if _is_of_transformers(path)]
    if found:
        raise _of_transformers(max(found, key=lambda path: int(path.name.rpartition("-")[2])))


def _is_of_transformers(folder: Path) -> bool:
    ours = any((folder / name).exists() for name in (MANIFEST, _OF_WHET))
    return (folder / _STATE).is_file() and not ours


def _of_transformers(folder: Path) -> StorageError:
    return StorageError(
        what=f"{folder} is a checkpoint of transformers' Trainer",
        got=f"{_STATE}, but no {MANIFEST}",
        why="whet can only resume its own checkpoints: those of transformers hold the optimizer as a pickle",
        fix=f"{_from_weights(folder)}; or resume with transformers' Trainer and whet.optimize(model)",
    )


def _from_weights(folder: Path) -> str:
    name, run = shlex.quote(str(folder)), "another --output_dir, no --resume_from_checkpoint"
    if (folder / _ADAPTER).is_file():
        return f"merge its adapter, run: whet merge {name} --output_dir MERGED; then --model_name_or_path MERGED, {run}"
    return f"start from its weights: --model_name_or_path {name}, {run}"


def _never_sealed(folder: Path, use: str | None) -> StorageError:
    if _is_of_transformers(folder):
        return _of_transformers(folder)
    if use is not None:
        fix = f"use {use}"
    elif (folder / _CONFIG).is_file() or (folder / _ADAPTER).is_file():
        fix = _from_weights(folder)
    else:
        fix = f"name a folder checkpoint-STEP of a run; or {_NEW_RUN}"
    return StorageError(
        what=f"{folder} is not a complete checkpoint",
        got=f"no {MANIFEST}",
        why=f"whet writes {MANIFEST} last: without it the folder is something else, or saving it did not finish",
        fix=fix,
    )
