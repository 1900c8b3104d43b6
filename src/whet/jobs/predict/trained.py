"""How a trained model reads its input: a small file next to the weights, for `whet predict`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.models.loading import exported
from whet.models.loading.folder_check import file_of_run
from whet.models.loading.load import ModelSource, model_folder
from whet.watch import files as output_files

NAME = "whet_task.json"


def as_text(values: Mapping[str, Any]) -> str:
    """Return the content of the file for these values."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def write_reading(folder: Path, values: Mapping[str, Any], on_error: str) -> None:
    """Write how the model reads its input; `task` is among the values. `on_error` as in `output_files.stored`."""
    output_files.write_result(folder / NAME, as_text(values), on_error)


def folder_of(name: str, flag: str = "--model") -> Path:
    """Return the folder of a trained model: the one that is named, or where what the hub has of this name lies here.

    Raises ConfigError if the hub has no such model, or has an adapter or an export, which are read from a folder alone.
    """
    if os.path.isdir(name):  # noqa: PTH112 - Path.is_dir raises if this user may not look
        return Path(name)
    folder = model_folder(ModelSource(model=name, flag=flag))
    if exported.about_folder(str(folder)) is not None:
        raise export_of_hub(name, flag)
    return folder


def export_of_hub(name: str, flag: str) -> ConfigError:
    """Return the error for a name on the hub, given by `flag`, under which there is a folder of `whet export`."""
    return ConfigError(
        what="the model on the hub is an export",
        got=name,
        why="of the hub whet reads weights in safetensors, and an export is the graph of another runtime",
        fix=f"download it: hf download {name} --local-dir EXPORT; then name that folder in {flag}",
    )


def read_reading(folder: Path) -> dict[str, Any]:
    """Return what was written; for a checkpoint that has no such file, from the folder around it.

    Empty for a model that was trained elsewhere, and for a file that is damaged.
    """
    try:
        path = file_of_run(folder, NAME)
        found = None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
