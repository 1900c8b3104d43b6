"""A model's folder on this machine: the one that is named, or what the hub has of it that holds no code.

Whether the hub answers is found out once, in at most three seconds.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from functools import cache
from pathlib import Path
from typing import Any

from whet.errors import Problem

_JSON, _TEXT, _TENSORS = "*.json", "*.txt", "*.safetensors"
CHAT_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""The files of chat templates, which transformers prefers to those in tokenizer_config.json."""
_FILES = {
    "model": [_JSON, _TENSORS],
    "tokenizer": [_JSON, _TEXT, "*.model", *CHAT_TEMPLATES],
    "config": ["config.json"],
}

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


def is_hub_name(name: str) -> bool:
    """Return whether this is a name that the hub could have, and not that of a file or folder of this machine."""
    return bool(_HUB_NAME.fullmatch(name)) and not os.path.lexists(name)


def cached_snapshot(name: str, *, cache_dir: str | None, revision: str) -> Path | None:
    """Return the folder in the hub's cache that this revision was read from, None if there is none; asks no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError):  # nothing of this name is cached, or the hub could not have the name
        return None


def local_folder(name: str, part: str, *, cache_dir: str | None, revision: str, token: str | None) -> Path:
    """Return the folder with the files of this part: model, tokenizer or config. Of the hub, no .bin and no .py comes.

    What the hub's client raises comes through: a name that is none, no network, a file that is missing.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    wanted = _FILES[part]
    options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": [f"*/{one}" for one in wanted]}
    if is_cached(name, "model", cache_dir) and unreachable():
        options["local_files_only"] = True  # the client would ask again, and wait, for each part
    return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, token=token, **options))


_LONGEST_S = 3.0


def hub_problem(name: str, flag: str, kind: str, cache_dir: str | None = None) -> Problem | None:
    """Return that this model or dataset (`kind`) has to come from the hub, and that the hub cannot be reached."""
    if Path(name).exists() or is_cached(name, kind, cache_dir):
        return None
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()
    if reason is None:
        return None
    first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect to the network (a mirror: HF_ENDPOINT)"
    return Problem(
        what=f"{flag}: there is no such folder, and the hub, which may have a {kind} of this name, cannot be reached",
        got=name,
        why=f"{reason}, and nothing of this name is on this machine",
        fix=f"correct the path, if it is one; else {first}; "
        f"or download it elsewhere, copy it here and name its folder in {flag}",
    )


def is_cached(name: str, kind: str, cache_dir: str | None = None) -> bool:
    """Return whether an earlier download of this name lies on this machine; what of it, reading will say."""
    from huggingface_hub import constants

    folder = Path(cache_dir or constants.HF_HUB_CACHE)
    found = [folder / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        converted = Path(cache_dir) if cache_dir else Path(constants.HF_HOME) / "datasets"
        found += [converted / name.replace("/", "___"), *folder.glob(f"datasets--*--{Path(name).name}")]
        found += [path for path in converted.glob(f"*{Path(name).name}*") if path.is_dir()]
    return any(os.path.isdir(path) for path in found)  # noqa: PTH112 - Path.is_dir raises if this user may not look


@cache
def unreachable() -> str | None:
    """Return why the hub does not answer; None if it does."""
    said: list[str | None] = []
    asking = threading.Thread(target=lambda: said.append(_ask()), daemon=True)  # a name server may take half a minute
    asking.start()
    asking.join(_LONGEST_S)
    return said[0] if said else f"it did not answer within {_LONGEST_S:g} s"


def _ask() -> str | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_LONGEST_S)
    except Exception as error:  # of the client's own library, or of the system
        return str(error) or type(error).__name__
    return None
