"""The files that a run writes next to its checkpoints: complete or absent, and never written through a link.

Each file is written under a hidden name, synced, and renamed over the old one. A rename replaces a link, a pipe or a
device of that name; it does not write to it. Logs are appended to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.config.ranks import here
from whet.errors import StorageError
from whet.log import logger
from whet.store import find
from whet.store.write import MODEL_STAGING, disk_fix, resumable
from whet.system import follow_umask, fsync, fsync_handle, open_plain, rename

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_CONFIG, _MODULES, _EXPORT = "config.json", "modules.json", "export.json"
_OF_MODELS = (
    "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "whet_task.json",
    _MODULES, "config_sentence_transformers.json", "sentence_bert_config.json",
)  # fmt: skip
"""What readers take for a part of the model in a folder, next to its weights."""
_OF_EXPORTS = (_EXPORT, "serve.py", "model.onnx", "model.onnx.data", "openvino_model.xml", "openvino_model.bin")
_TEMPLATES = "additional_chat_templates"
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                  "chat_template.jinja", "chat_template.json")  # fmt: skip
_MODULE_FOLDER = re.compile(r"\d+_\w+")
"""A folder of one of sentence-transformers' modules."""


def open_to_append(path: Path) -> int:
    """Return a handle that appends to the file and can read it; what is there but no plain file of its own is removed.

    That is a link, a hard link to another file, a pipe or a device.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            path.unlink()
    return open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def write_text(path: Path, text: str) -> None:
    """Replace the file by one with this text, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file by one with this content, or raise OSError and leave the old one as it was; rank 0 writes."""
    if not here().is_first:
        return
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        with suppress(FileNotFoundError):
            unfinished.unlink()
        handle = open_plain(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            fsync_handle(file.fileno())
        rename(unfinished, path, replaces=True)
        fsync(path.parent.resolve())
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def remove(path: Path) -> None:
    """Remove the file, or the link of this name, if there is one; only rank 0 does."""
    if here().is_first:
        path.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any], *, indent: int, on_error: str) -> None:
    """Replace the file by these values as JSON, as `write_result` does."""
    write_result(path, json.dumps(values, indent=indent, sort_keys=True) + "\n", on_error)


def write_result(path: Path, text: str, on_error: str) -> bool:
    """Replace the file by one with this text, and return whether that worked; create its folder if needed.

    `on_error` as in `stored`. A run that continues without the file removes the old one: it would pass for its own.
    """
    with stored(f"{path.name} cannot be written", path.parent, on_error=on_error):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return True
    with suppress(OSError):
        remove(path)
    return False


def write_model(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write(staging)`, which writes a model, then move its files to the folder; StorageError if that fails.

    Only rank 0 of a run writes. Nothing in the folder changes before the complete model is on the disk. What an earlier
    model has left is removed: its weights, its adapter or its modules would be read in place of the new ones.
    """
    staging = folder / MODEL_STAGING
    if not here().is_first:
        return
    with stored(f"the model cannot be written to {folder}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove(staging)
        staging.mkdir()
        try:
            write(staging)
            names = _names(staging)
            for name in names:
                follow_umask(staging / name)
                fsync(staging / name)
            for path in _left_by_others(folder, names):
                path.unlink()
            for name in names:
                _make_folders(folder, name.parent)
                rename(staging / name, folder / name, replaces=True)
            fsync(folder.resolve())
        finally:
            _remove(staging)


def copy_model(source: Path, folder: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy the model of one run into the folder of another, with what lies next to it, as `write_model` does.

    Checkpoints, links, hidden files, what TensorBoard reads, and these names are left out.
    """

    def fill(staging: Path) -> None:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            first = name.parts[0]
            is_extra = first.startswith((".", "checkpoint-", "abandoned-")) or first in {"runs", *leave_out}
            if path.is_file() and not path.is_symlink() and not is_extra:
                (staging / name.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, staging / name)

    write_model(folder, fill)


@contextmanager
def stored(what: str, folder: Path, *, on_error: str = "stop") -> Iterator[None]:
    """Raise StorageError (exit 74) if writing fails within the block; the error names the newest checkpoint.

    With `on_error` "continue" (`--save_error_policy`) it is logged instead.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = StorageError(
            what=what,
            got=str(error),
            why="a file counts only when it is complete on the disk; no checkpoint was changed",
            fix=disk_fix(error, folder),
        )
        if on_error == "stop":
            newest = _newest(folder)
            raise resumable(problem, newest, {"resume_from_checkpoint": "auto"}) from error
        logger.warning("the run continues without this file: %s", problem)


def _newest(folder: Path) -> Path | None:
    try:
        return find.newest_complete(folder)
    except OSError:
        return None


def _names(staging: Path) -> list[Path]:
    """Return the files in the staging folder, relative to it; weights last: without them the folder is no model."""
    found = [Path(place, name).relative_to(staging) for place, _, files in os.walk(staging) for name in files]
    return sorted(found, key=lambda name: (bool(_WEIGHTS.fullmatch(name.name)), name))


def _left_by_others(folder: Path, names: Collection[Path]) -> list[Path]:
    """Return the files of the model that is in the folder which one of these names does not replace.

    A tokenizer stays if the new model is saved without one: it may be the user's own.
    """
    left = [path for path in sorted(folder.iterdir()) if _WEIGHTS.fullmatch(path.name) and Path(path.name) not in names]
    known = [*_OF_MODELS, *([_CONFIG] if left else [])]  # the configuration is that of the weights next to it
    export, modules = (_content_of(folder / name) for name in (_EXPORT, _MODULES))
    if isinstance(export, dict) and "whet" in export:
        known += _OF_EXPORTS
    if any(name.name in _OF_TOKENIZERS for name in names):
        known += _OF_TOKENIZERS
        templates = folder / _TEMPLATES
        known += [] if templates.is_symlink() else [f"{_TEMPLATES}/{path.name}" for path in templates.glob("*.jinja")]
    for one in modules if isinstance(modules, list) else []:
        place = one.get("path") if isinstance(one, dict) else None
        if isinstance(place, str) and _MODULE_FOLDER.fullmatch(place) and not (folder / place).is_symlink():
            known += [f"{place}/{path.name}" for path in (folder / place).glob("*") if _is_of_module(path.name)]
    found = [folder / name for name in known if Path(name) not in names]
    return [*left, *(path for path in found if path.is_file())]


def _is_of_module(name: str) -> bool:
    return name == _CONFIG or _WEIGHTS.fullmatch(name) is not None


def _content_of(path: Path) -> Any:
    """Return what a file of JSON holds; None if there is none that can be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _make_folders(folder: Path, name: Path) -> None:
    """Create the sub-folder; a file or link of its name is removed."""
    for part in [*reversed(name.parents), name]:
        place = folder / part
        if place == folder:
            continue
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            place.unlink()
        place.mkdir(exist_ok=True)


def _remove(staging: Path) -> None:
    """Remove the staging folder, or a link, a pipe or a file of its name, but not the target of a link."""
    if staging.is_dir() and not staging.is_symlink():
        shutil.rmtree(staging, ignore_errors=True)
    elif os.path.lexists(staging):
        staging.unlink()
