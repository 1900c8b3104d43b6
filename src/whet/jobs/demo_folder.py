"""The folder of a demo, which the next one may replace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from whet.config.arguments import TrainingArguments
from whet.config.rules.training import NOT_COUNTED
from whet.errors import ConfigError


def require_own(folder: Path, marker: str, args: TrainingArguments, fixed: Sequence[str]) -> None:
    """Raise ConfigError if the folder contains anything but the files of an earlier demo.

    `marker` is the file that the demo writes first, `fixed` the settings that every run of it has. A folder with
    checkpoints, or with a training of other settings, has become somebody's work.
    """
    names = set(os.listdir(folder)) - NOT_COUNTED  # noqa: PTH208 - only the names are asked for
    has_checkpoints = any(name.startswith(("checkpoint-", "abandoned-")) for name in names)
    own = marker in names and not has_checkpoints and _trained_here(folder / "training_args.json", args, fixed)
    if names and not own:
        raise ConfigError(
            what="output_dir is not empty",
            got=str(folder),
            why="it holds files that are not of a demo, and the demo would replace some of them",
            fix="use another --output_dir, or empty this one",
        )


def _trained_here(path: Path, args: TrainingArguments, fixed: Sequence[str]) -> bool:
    """Return whether the last training in the folder, if one came to its end, had the settings of a demo."""
    if not path.exists():
        return True
    try:
        kept = json.loads(path.read_text("utf-8"))
        return all(kept[name] == getattr(args, name) for name in fixed)
    except (OSError, ValueError, TypeError, KeyError):
        return False
