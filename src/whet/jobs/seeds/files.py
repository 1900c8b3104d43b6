"""The files of a run with several seeds: the record of a seed that has finished, the best model, the results of all."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from whet.config.arguments import TrainingArguments
from whet.config.rules.training import LOCK_NAME, LOG_NAME, OLDER_LOG_NAME
from whet.errors import ConfigError
from whet.jobs.fields import JobFields
from whet.store.compare import require_same_settings
from whet.train.output import files as output_files
from whet.train.output import results

RECORD = "seed_finished.json"
_OWN = {RECORD, LOCK_NAME, LOG_NAME, OLDER_LOG_NAME}
"""Files of a seed that say nothing about its model."""
_FILES = ("train_file", "validation_file", "test_file")
_FREE = {"seeds", "token", "cache_dir", "overwrite_cache", "preprocessing_num_workers", *_FILES}
"""Settings of a task that may change between a seed and the next; files are compared by their content."""
_LENGTH = ("num_train_epochs", "min_steps", "max_steps")
_READ_BYTES = 1 << 20


def settings_of(job: JobFields, args: TrainingArguments) -> dict[str, Any]:
    """Return what all seeds have in common, and a resumed run must have too."""
    task = {name: value for name, value in asdict(job).items() if name not in _FREE}
    data = {name: _digest(Path(path)) for name in _FILES if (path := getattr(job, name))}
    found = task | {name: getattr(args, name) for name in _LENGTH} | data
    return json.loads(json.dumps(found))  # in the form that the record gives back


def read(folder: Path, settings: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any] | None:
    """Return the record of a seed that has finished, None if it has not; ConfigError if it had other settings."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        before = record["settings"]
        complete = {"metrics", "lines", "precision"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not complete or not (folder / "config.json").is_file():
        return None
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise ConfigError(
            what=f"{folder.name} was trained with other settings or data: {', '.join(changed)}",
            got="; ".join(f"{name}: {before.get(name)} then, {settings[name]} now" for name in changed),
            why="the seeds of a run are compared, so they differ in nothing else",
            fix="use the settings and data of the first seed, or another --output_dir without --resume_from_checkpoint",
        )
    require_same_settings(replace(args, seed=int(record["seed"])), folder)
    return record


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Note that this seed has finished."""
    output_files.write_json(folder / RECORD, record, indent=2, on_error="stop")


def remove(folder: Path) -> None:
    """Forget that the seed has finished: it is trained again."""
    (folder / RECORD).unlink(missing_ok=True)


def copy(seed_folder: Path, folder: Path) -> None:
    """Copy the model and the results of a seed to the output folder, all or nothing of the model."""

    def fill(staging: Path) -> None:
        for path in sorted(seed_folder.iterdir()):
            if path.is_file() and not path.is_symlink() and path.name not in _OWN:
                shutil.copyfile(path, staging / path.name)

    output_files.write_model(folder, fill)


def write_results(folder: Path, metrics: Mapping[str, Any], seeds: Mapping[int, Mapping[str, Any]], by: str) -> None:
    """Write the metrics of the best seed with the spread (all_results.json), and those of every seed (seeds.json)."""
    results.save(str(folder), "all", metrics, combined=False)
    each = {f"seed-{seed}": {name: _plain(value) for name, value in own.items()} for seed, own in seeds.items()}
    summary = {"chosen_by": by, "best": f"seed-{metrics['best_seed']}", "metrics": each}
    output_files.write_json(folder / "seeds.json", summary, indent=2, on_error="stop")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _digest(path: Path) -> str:
    digest = xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
