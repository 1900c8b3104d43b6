"""How a trained model reads its input: a small file next to the weights, for `whet predict`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.models.loading.folder_check import file_of_run
from whet.watch import files as output_files

NAME = "whet_task.json"


def as_text(values: Mapping[str, Any]) -> str:
    """Return the content of the file for these values."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def write_reading(folder: Path, values: Mapping[str, Any], on_error: str) -> None:
    """Write how the model reads its input; `task` is among the values. `on_error` as in `output_files.stored`."""
    output_files.write_result(folder / NAME, as_text(values), on_error)


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
