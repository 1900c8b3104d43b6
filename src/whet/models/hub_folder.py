"""A model's folder on this machine: the one that is named, or what the hub has of it that holds no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_JSON, _TEXT, _TENSORS = "*.json", "*.txt", "*.safetensors"
_FILES = {"model": [_JSON, _TENSORS], "tokenizer": [_JSON, _TEXT, "*.model"], "config": ["config.json"]}


def local_folder(name: str, part: str, *, cache_dir: str | None, revision: str, token: str | None) -> Path:
    """Return the folder with the files of this part: model, tokenizer or config. Of the hub, no .bin and no .py comes.

    What the hub's client raises comes through: a name that is none, no network, a file that is missing.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": _FILES[part], "ignore_patterns": ["*/*"]}
    return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, token=token, **options))
