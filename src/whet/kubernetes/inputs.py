"""Files that a command of whet reads in the pods: each must be on a volume that the pods have."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from whet.errors import ConfigError
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.outputs import CACHE, OUTPUT, TEMPORARY, require_written

DATA = "/data"
_PATHS = ("file", "adapter", "context")
"""Options that never name something on the hub, next to those that end in _file."""
_WRITTEN = ("output_dir", "logging_dir", "cache_dir")


def require_mounted(settings: Any, asked: KubernetesFields) -> None:
    """Raise ConfigError if one of the settings names a file or folder that the pods cannot have, or cannot write."""
    require_written(settings)
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if isinstance(value, str) and value:
            _require_claim(name, value, asked)
            _require_absolute(name, value)


def require_file_of_pods(name: str, value: str, asked: KubernetesFields) -> None:
    """Raise ConfigError if this is not a file that the pods have: of a claim, or of the image."""
    _require_claim(name, value, asked)
    _require_absolute(name, value, is_path=True)


def _require_claim(name: str, value: str, asked: KubernetesFields) -> None:
    claims = {DATA: ("data_claim", asked.data_claim)}
    if not name.endswith("_dir"):  # a folder to write to can be in the pod's own /cache
        claims[CACHE] = ("cache_claim", asked.cache_claim)
    for folder, (option, claim) in claims.items():
        if claim is None and PurePosixPath(value).is_relative_to(folder):
            raise ConfigError(
                what=f"{name} is on a volume that the pods do not have",
                got=f"--{name} {value}, without --{option}",
                why=f"{folder} holds files only if a claim is mounted there",
                fix=f"add --{option} CLAIM, the name of the PersistentVolumeClaim with this file, before the --",
            )


def _require_absolute(name: str, value: str, *, is_path: bool = False) -> None:
    """Refuse paths of this machine. A relative name of a model or a data set is one of the hub."""
    if name in _WRITTEN:
        return
    file = PurePosixPath(value).name
    if PurePosixPath(value).is_relative_to(TEMPORARY):
        raise ConfigError(
            what=f"{name} is in {TEMPORARY}",
            got=value,
            why=f"{TEMPORARY} of a pod is its own, and empty when it starts",
            fix=f"use --{name} {DATA}/{file} with --data_claim, or --{name} {OUTPUT}/{file} if it is on --output_claim",
        )
    is_path = is_path or name.endswith("_file") or name in _PATHS or value.startswith(("./", "../", "~"))
    if PurePosixPath(value).is_absolute() or not is_path:
        return
    raise ConfigError(
        what=f"{name} is a relative path",
        got=value,
        why=f"in the pods it means a path in {OUTPUT}, the working directory, and not one of this machine",
        fix=f"use --{name} {DATA}/{file} with --data_claim, or --{name} {OUTPUT}/{file} if it is on --output_claim",
    )
