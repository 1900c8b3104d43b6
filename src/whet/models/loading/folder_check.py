"""A model folder is hostile until it is checked: what leaves it, what runs code, and what is larger than it can be.

Everything here is decided before transformers opens a file of the folder.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.strict_json import BadJson, parse_document

CONFIG, TOKENIZER_CONFIG, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
_TEMPLATES = "additional_chat_templates"
_MIB = 1 << 20
_LARGEST_BYTES = {
    CONFIG: 8 * _MIB,
    TOKENIZER_CONFIG: 16 * _MIB,
    "special_tokens_map.json": 4 * _MIB,
    "added_tokens.json": 16 * _MIB,
    "model.safetensors.index.json": 32 * _MIB,
    TOKENIZER: 128 * _MIB,
}
"""Limits of the JSON files, far above those of the largest models that are published."""
_LARGEST_TEXT_BYTES = 128 * _MIB
"""Limit of vocabularies, merges and templates."""
_READ_WHOLE = (".json", ".txt", ".model", ".jinja", ".bpe", ".vocab")
ADAPTER = "adapter_config.json"


def check_folder(folder: Path, *, adapter: bool = False) -> None:
    """Refuse a folder of whose files one leaves it, is no plain file, or is too large to be what its name says.

    One with an adapter is refused too, unless `adapter` says that nothing of that is read.
    """
    for path in sorted(folder.iterdir()):
        if path.name == _TEMPLATES and path.is_dir():
            for template in sorted(path.iterdir()):
                _check_entry(template, folder)
        _check_entry(path, folder)
    if not adapter and (folder / ADAPTER).exists():
        raise bad_model(
            f"{folder}: this is an adapter",
            got=ADAPTER,
            why="it names a model of its own choice, to be loaded from another place",
            fix="fold it into its model, and name that folder: whet merge FOLDER --output_dir MERGED; whet predict, "
            "whet ask and whet generate take an adapter as it is",
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the folder; raises ConfigError if it is damaged or anything else."""
    try:
        value = parse_document(path.read_text("utf-8"))
    except BadJson as problem:
        raise bad_model(f"{path}: {problem.what}", got=problem.got, why=problem.why, fix=problem.fix) from None
    except FileNotFoundError:
        raise bad_model(f"{path} is missing", why="it says how the model is built", fix=_AGAIN) from None
    except (OSError, ValueError) as error:
        raise bad_model(f"{path}: cannot be read", got=str(error), why="it has to be UTF-8 text", fix=_AGAIN) from None
    if not isinstance(value, dict):
        raise bad_model(f"{path}: holds no object", got=type(value).__name__, why="settings have names", fix=_AGAIN)
    return value


def plain_name(name: object) -> bool:
    """Return whether this is the name of a file in the folder itself: no path, nothing that leads elsewhere."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and not any(letter in name for letter in "/\\\0:")
        and name.isprintable()
    )


def bad_model(what: str, *, why: str, fix: str, got: object = None) -> ConfigError:
    """Return the error of a model folder that is not loaded; `what` says which file of it, and what is wrong."""
    return ConfigError(what=f"the model cannot be loaded: {what}", got=got, why=why, fix=fix)


_AGAIN = "copy the folder again from where it comes, or use another model"


def _check_entry(path: Path, folder: Path) -> None:
    if path.is_symlink() and not _stays(path, folder):
        raise bad_model(
            f"{path}: this link leaves the folder",
            got=str(path.readlink()),
            why="a model is read from its own folder alone",
            fix="put the file itself in its place, or remove the link",
        )
    kind = path.stat()
    if stat.S_ISDIR(kind.st_mode):
        return
    if not stat.S_ISREG(kind.st_mode):
        raise bad_model(
            f"{path}: this is a pipe, a socket or a device",
            got=stat.filemode(kind.st_mode),
            why="a model folder holds plain files",
            fix="remove it",
        )
    limit = _LARGEST_BYTES.get(path.name, _LARGEST_TEXT_BYTES if path.suffix in _READ_WHOLE else None)
    if limit is not None and kind.st_size > limit:
        raise bad_model(
            f"{path}: the file is too large",
            got=f"{kind.st_size:,} bytes",
            why=f"at most {limit:,} bytes are read of such a file",
            fix=_AGAIN,
        )


def _stays(path: Path, folder: Path) -> bool:
    """Return whether the link ends in the folder, or in the file store of the hub's cache, next to a snapshot."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    root = folder.resolve()
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.is_relative_to(root.parents[1] / "blobs")
