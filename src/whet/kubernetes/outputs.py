"""Folders that a command of whet writes to in the pods: each must outlive the pod, or at least exist there."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from whet.errors import ConfigError

OUTPUT = PurePosixPath("/output")
"""Where the claim for checkpoints and models is mounted; also the working directory."""
CACHE = "/cache"
TEMPORARY = "/tmp"  # noqa: S108  a folder of the pod's own
_KEPT = ("output_dir", "logging_dir")


def require_written(settings: Any) -> None:
    """Raise ConfigError if a setting names a folder for results that is not on the claim, or cannot be written."""
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if name in _KEPT and value is not None:
            require_kept_output(name, value)
        elif name == "cache_dir" and value is not None:
            _require_writable(name, value)
    if getattr(settings, "overwrite_output_dir", False):
        raise ConfigError(
            what="overwrite_output_dir does not fit a job that resumes",
            got="--overwrite_output_dir",
            why="a pod that starts again resumes from the newest checkpoint, which that option would delete",
            fix="leave --overwrite_output_dir out, and use a new --output_dir for a new run",
        )


def require_kept_output(name: str, value: str) -> None:
    """Raise ConfigError if this folder or file does not lie on the claim for the output."""
    place = OUTPUT / value
    if not place.is_relative_to(OUTPUT) or ".." in place.parts:
        raise ConfigError(
            what=f"{name} is not on the claim for the output",
            got=value,
            why=f"pods can write to {OUTPUT} only, besides folders that end with them",
            fix=f"use --{name} {OUTPUT}/{place.name or 'run'}",
        )


def _require_writable(name: str, value: str) -> None:
    place = OUTPUT / value
    writable = any(place.is_relative_to(folder) for folder in (OUTPUT, CACHE, TEMPORARY))
    if not writable or ".." in place.parts:
        raise ConfigError(
            what=f"{name} cannot be written in the pods",
            got=value,
            why=f"only {OUTPUT}, {CACHE} and {TEMPORARY} can be written; the rest is read-only",
            fix=f"use --{name} {CACHE}/{place.name}, with --cache_claim if the next job is to find it",
        )
