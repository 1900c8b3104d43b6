"""A model's folder on this machine: the one that is named, or what the hub has of it that holds no code."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

from whet.errors import Problem
from whet.models.loading.hub_reach import is_cached, unreachable

_JSON, _TEXT, _TENSORS = "*.json", "*.txt", "*.safetensors"
_FILES = {"model": [_JSON, _TENSORS], "tokenizer": [_JSON, _TEXT, "*.model"], "config": ["config.json"]}

_HUB_NAME = re.compile(r"(?![.-])[\w.-]{1,96}(/[\w.-]{1,96})?(?<![.-])")


def missing_folder(name: str, flag: str) -> Problem | None:
    """Return that there is no such folder, where a name is neither one nor a name that the hub could have.

    What the system does not tell is not missing: reading it will say why.
    """
    try:
        mode = Path(name).stat().st_mode
    except PermissionError:
        return None
    except (OSError, ValueError):  # a name that no disk can hold, too
        mode = 0
    if stat.S_ISDIR(mode) or (_HUB_NAME.fullmatch(name) and not mode):
        return None
    is_file = bool(mode)
    return Problem(
        what=f"{flag} names a file, not a folder" if is_file else f"{flag}: no such folder",
        got=name,
        why="a model is a folder with config.json, its weights and its tokenizer, or a name on the hub",
        fix=f"name the folder that holds it in {flag}" if is_file else f"correct the path in {flag}",
    )


def local_folder(name: str, part: str, *, cache_dir: str | None, revision: str, token: str | None) -> Path:
    """Return the folder with the files of this part: model, tokenizer or config. Of the hub, no .bin and no .py comes.

    What the hub's client raises comes through: a name that is none, no network, a file that is missing.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": _FILES[part], "ignore_patterns": ["*/*"]}
    if is_cached(name, "model", cache_dir) and unreachable():
        options["local_files_only"] = True  # the client would ask again, and wait, for each part
    return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, token=token, **options))
