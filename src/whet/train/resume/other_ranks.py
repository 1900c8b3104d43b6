"""Resuming with another number of ranks: a step keeps its rows, as others would give another curve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from whet.config import deepspeed
from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.log import logger
from whet.train.checkpoint import manifest
from whet.train.resume.compare import ARGUMENTS

_ROWS, _BATCHES = "per_device_train_batch_size", "gradient_accumulation_steps"


def with_step_of(folder: Path, args: TrainingArguments, n_ranks: int) -> TrainingArguments:
    """Return the settings with which so many ranks take the steps of this checkpoint's run, each as large as before.

    Settings stay as they are if the number of ranks is the same, if `rows_per_step` may change, or if the rows cannot
    be dealt evenly; the comparison with the checkpoint follows.
    """
    before = manifest.n_ranks_of(folder)
    if before == n_ranks or "rows_per_step" in args.resume_allow_changes:
        return args
    rows, rest = divmod(_rows_per_step(folder) * before, n_ranks)
    if rest or not rows or rows == args.per_device_train_batch_size * args.gradient_accumulation_steps:
        return args
    at_a_time = next(n for n in range(min(args.per_device_train_batch_size, rows), 0, -1) if rows % n == 0)
    sizes = {_ROWS: at_a_time, _BATCHES: rows // at_a_time}
    _require_auto(args, sizes, f"{before} ranks then, {n_ranks} now")
    logger.info(
        "the run had %d ranks and has %d now: each takes %d batches of %d rows a step, so that steps keep their rows",
        before, n_ranks, rows // at_a_time, at_a_time,
    )  # fmt: skip
    return replace(args, **sizes)


def _require_auto(args: TrainingArguments, sizes: Mapping[str, int], got: str) -> None:
    """Refuse sizes that the configuration of DeepSpeed says itself if other ranks need others."""
    fixed = {key: size for key, (name, size) in deepspeed.fixed_sizes(args.deepspeed).items() if size != sizes[name]}
    if not fixed:
        return
    names = " and ".join(fixed)
    flags = " ".join(f"--{name} {size}" for name, size in sizes.items())
    raise ConfigError(
        what="the number of ranks changed, and the configuration of DeepSpeed does not let whet divide the step again",
        got=f"{got}; {', '.join(f'{key} {size}' for key, size in fixed.items())}",
        why="a step keeps its rows, so each rank takes other numbers of them than before",
        fix=f'write "auto" for {names} in the configuration; or give {flags} and write these numbers there',
    )


def _rows_per_step(folder: Path) -> int:
    """Return the rows of a step on each rank of the checkpoint's run; 0 if its file cannot be read."""
    try:
        kept = json.loads((folder / ARGUMENTS).read_text("utf-8"))
        return int(kept[_ROWS]) * int(kept[_BATCHES])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
