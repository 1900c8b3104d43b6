"""Writes and prints the metrics of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.log import logger
from whet.strict_json import jsonable
from whet.watch import files as output_files


def save(
    output_dir: str, split: str, metrics: Mapping[str, Any], *, combined: bool = True, on_error: str = "stop"
) -> None:
    """Write {split}_results.json, and add the metrics to all_results.json; `on_error` as in `output_files.stored`."""
    folder = Path(output_dir)
    _write_json(folder / f"{split}_results.json", metrics, on_error)
    if combined:
        path = folder / "all_results.json"
        _write_json(path, _read_object(path) | dict(metrics), on_error)


def prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metrics under `prefix_name`; those that already have the prefix keep their names."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def _write_json(path: Path, values: Mapping[str, Any], on_error: str) -> None:
    numbers = {name: _json_number(value) for name, value in values.items()}
    output_files.write_json(path, numbers, indent=4, on_error=on_error)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the content of the file of an earlier run; empty if it is a link, or not written by whet."""
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() and not path.is_symlink() else {}
        return dict(found)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read and is written again: %s", path, error)
        return {}


def _json_number(value: Any) -> Any:
    """Return the value; NaN and the infinities, which JSON does not have, as text."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    value = jsonable(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
