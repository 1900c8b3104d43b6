"""The results in an output folder: the metrics, and the files that say what a model made of each example.

A folder is used again: to judge the model that was trained there, to resume, to train another one. All results in it
are of one model. A split that is judged again replaces what was said of it (`save`). A training that has taken a step
removes what was said of the model before (`forget`), and so does who judges another one (`settle`): OWNER_NAME
has the checksum of the model that the results are of. Files of other names, and links, stay.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.config.ranks import here
from whet.config.rules.training import OWNER_NAME
from whet.log import logger
from whet.strict_json import jsonable
from whet.watch import files as output_files
from whet.watch import printing

ALL, SEEDS, STATE = "all_results.json", "seeds.json", "trainer_state.json"
ERRORS = {"eval": "errors.jsonl", "predict": "predict_errors.jsonl"}
"""Prefix of a split's metrics -> the file of its worst examples."""
_OF_EXAMPLES = (
    "{}_predictions.jsonl", "{}_predictions.json", "{}_nbest_predictions.json", "{}_null_odds.json", "{}_confusion.csv",
)  # fmt: skip
_OF_SCRIPTS = {"predict": ("predict_results.txt", "predictions.txt")}
"""Files that transformers' scripts write of a split, under their names."""
_TOGETHER = {"eval": ("eval_", "start_")}
"""Prefixes of metrics that are known together: those of the model before its training were measured on this split."""


def save(
    output_dir: str,
    split: str,
    metrics: Mapping[str, Any],
    *,
    combined: bool = True,
    files: Collection[str] | None = None,
    on_error: str = "stop",
) -> None:
    """Write {split}_results.json, and put the metrics in place of those of the split in all_results.json.

    `files` are the names of what else was written of the split: its other files are removed, which were written of
    other data, or for other labels; None: they stay. `on_error` as in `output_files.stored`.
    """
    folder = Path(output_dir)
    _write_json(folder / f"{split}_results.json", metrics, on_error)
    if combined:
        old = _read_object(folder / ALL)
        others = {name: value for name, value in old.items() if not name.startswith(prefixes_of(split))}
        _write_json(folder / ALL, others | dict(metrics), on_error)
    if files is None:
        return
    if removed := _remove(folder, (name for name in _names_of(split) if name not in files), on_error):
        logger.info("removed what was said of other data before, and is not now: %s", ", ".join(removed))


def read(folder: Path, split: str) -> dict[str, Any]:
    """Return the numbers that {split}_results.json has; none if there is no such file, or it is a link."""
    found = _read_object(folder / f"{split}_results.json")
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def forget(folder: Path, *, named: Collection[str] = ()) -> None:
    """Remove all results in this folder, which are of an earlier model; tell people of those that are `named`."""
    _forget(folder, _ALL_NAMES, named)


def names_in(folder: Path) -> list[str]:
    """Return the names of the results in this folder."""
    return [name for name in (ALL, *_ALL_NAMES) if (folder / name).is_file()]


def settle(folder: Path, model: str, before: str | None = None) -> bool:
    """Note that results are of this model from now on; return whether those in the folder were of another one.

    They are removed then, and named; what a training wrote of itself alone stays. `model` is a checksum, and `before`
    that of the model in the folder, whose the results are if nothing says otherwise. None: nobody knows, and they stay.
    """
    if not here().is_first:
        return False
    known = _read_object(folder / OWNER_NAME).get("model", before)
    names = [name for split in ERRORS for name in _all_names_of(split)]
    is_other = known not in (None, model) and _forget(folder, names, (ALL, *names))
    if known != model or not (folder / OWNER_NAME).exists():
        output_files.write_json(folder / OWNER_NAME, {"model": model}, indent=2, on_error="continue")
    return is_other


def _forget(folder: Path, names: Iterable[str], named: Collection[str]) -> bool:
    removed = _remove(folder, [ALL, *names], "continue")
    _remove(folder, [OWNER_NAME], "continue")
    if named_now := [name for name in removed if name in named]:
        printing.show_wrapped(f"removed the results of an earlier model: {', '.join(named_now)}")
    return bool(removed)


def prefixes_of(split: str) -> tuple[str, ...]:
    """Return what the metrics of the split begin with."""
    return _TOGETHER.get(split, (f"{split}_",))


def prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metrics under `prefix_name`; those that already have the prefix keep their names."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def _all_names_of(split: str) -> list[str]:
    return [f"{split}_results.json", *_names_of(split)]


def _names_of(split: str) -> list[str]:
    """Return the names of the files that a task may write of the split, next to its metrics."""
    examples = [name.format(split) for name in _OF_EXAMPLES] if split in ERRORS else []
    errors = [ERRORS[split]] if split in ERRORS else []
    return [f"{split}_left_out.json", *errors, *examples, *_OF_SCRIPTS.get(split, ())]


_ALL_NAMES = (SEEDS, STATE, *(name for split in ("train", *ERRORS) for name in _all_names_of(split)))


def _remove(folder: Path, names: Iterable[str], on_error: str) -> list[str]:
    """Remove the plain files of these names, and return those that were there; rank 0 does."""
    removed: list[str] = []
    for name in names if here().is_first else ():
        with suppress(FileNotFoundError):
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                continue
            with output_files.stored(f"{name} of an earlier model cannot be removed", folder, on_error=on_error):
                (folder / name).unlink()
                removed.append(name)
    return removed


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
