"""Windows kept on disk under a name made from all that they depend on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.data.store import RowStore
from whet.paths import follow_umask
from whet.tasks.qa.types import Questions, Windows
from whet.tasks.qa.windows.cut import WindowOptions, make_windows
from whet.tasks.qa.windows.encode import rust_tokenizer

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from transformers import PreTrainedTokenizerBase
    from xxhash import xxh3_128

_LAYOUT = 1
"""Raise this when the same input shall give other windows, or the file looks different."""
_PER_ROW = [field.name for field in fields(Windows) if field.name != "rows"]
_log = logging.getLogger("whet")


def cached_windows(
    questions: Questions,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    cache_dir: Path | None = None,
    overwrite_cache: bool = False,
    n_threads: int | None = None,
) -> Windows:
    """Return the windows of all questions: from the cache if it has them, else from `make_windows`, and keep them.

    The cache is `cache_dir`, else `$XDG_CACHE_HOME/whet`, else `~/.cache/whet`. Of several processes that want the same
    windows one makes them; the others wait and read. A damaged file is made anew. Where nothing can be written the
    windows are made and not kept. `overwrite_cache` makes them anew, except in a process that had to wait for another:
    it takes what that one has just made. The number of threads changes neither the windows nor their name.
    """
    folder = cache_dir or default_cache_dir()
    if folder is None:
        _log.warning("no home folder: the windows are not cached (name a folder, or set XDG_CACHE_HOME)")
        return make_windows(questions, tokenizer, options, n_threads=n_threads)
    key = windows_key(questions, tokenizer, options)
    path = folder / f"windows-{key}.safetensors"
    if not overwrite_cache and (found := _read(path, key, warn=False)) is not None:
        return found
    lock, waited = _lock(path)
    try:
        if (waited or not overwrite_cache) and (found := _read(path, key, warn=True)) is not None:
            return found
        windows = make_windows(questions, tokenizer, options, n_threads=n_threads)
        if lock is not None:
            _write(path, key, windows)
        return windows
    finally:
        if lock is not None:
            lock.release()


def default_cache_dir() -> Path | None:
    """Return whet's folder in the user's cache; None for a user without a home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "whet"
    try:
        return Path.home() / ".cache" / "whet"
    except RuntimeError:
        return None


def windows_key(questions: Questions, tokenizer: PreTrainedTokenizerBase, options: WindowOptions) -> str:
    """Return 32 hex digits made from everything that windows depend on: texts, answers, tokenizer, options, code."""
    import tokenizers
    from xxhash import xxh3_128

    settings = {
        "layout": _LAYOUT,
        "tokenizers": tokenizers.__version__,
        "options": asdict(options),
        "tokenizer": [
            tokenizer.padding_side,
            tokenizer.truncation_side,
            tokenizer.model_input_names,
            tokenizer.cls_token_id,
            tokenizer.bos_token_id,
            bool(getattr(tokenizer, "split_special_tokens", False)),
        ],
    }
    digest = xxh3_128()
    # the copy, because the tokenizer's own Rust part remembers the truncation and padding of its last call
    _add_texts(digest, [json.dumps(settings, sort_keys=True), rust_tokenizer(tokenizer).to_str()])
    _add_texts(digest, questions.questions)
    _add_texts(digest, questions.contexts)
    _add_numbers(digest, questions.context_of)
    _add_texts(digest, list(chain.from_iterable(answers.texts for answers in questions.answers)))
    _add_numbers(digest, [len(answers.texts) for answers in questions.answers])
    _add_numbers(digest, list(chain.from_iterable(answers.starts for answers in questions.answers)))
    return digest.hexdigest()


def _add_texts(digest: xxh3_128, texts: Sequence[str]) -> None:
    _add_numbers(digest, [len(text) for text in texts])
    digest.update("".join(texts).encode("utf-8", "surrogatepass"))


def _add_numbers(digest: xxh3_128, numbers: Sequence[int] | np.ndarray) -> None:
    array = np.asarray(numbers, dtype="<i8")
    digest.update(len(array).to_bytes(8, "little"))
    digest.update(array.tobytes())


def _lock(path: Path) -> tuple[BaseFileLock | None, bool]:
    """Return the lock of this file, held, and whether another process had it; None where nothing can be written."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        try:
            lock.acquire(timeout=0)
            return lock, False
        except Timeout:
            _log.info("waiting for another process that makes the same windows (%s)", path)
            lock.acquire()
            return lock, True
    except (OSError, NotImplementedError) as error:  # the second: a file system without locks
        _log.warning("the windows are not cached: %s cannot be written (%s)", path.parent, error)
        return None, False


def _read(path: Path, key: str, *, warn: bool) -> Windows | None:
    """Return the windows in this file; None if there is none or it is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        damage = metadata.get("key") != key or metadata.get("checksum") != _checksum(arrays)
        reason = "it does not hold what was written" if damage else ""
    except (OSError, SafetensorError) as error:
        arrays, reason = {}, str(error)
    if reason:
        _log.log(logging.WARNING if warn else logging.DEBUG, "%s is damaged, and made anew: %s", path, reason)
        return None
    _log.info("windows read from %s", path)
    return Windows(rows=RowStore.from_arrays(arrays), **{name: arrays[name] for name in _PER_ROW})


def _write(path: Path, key: str, windows: Windows) -> None:
    """Keep the windows in this file, whole or not at all. To be called with its lock held."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = windows.rows.arrays() | {name: getattr(windows, name) for name in _PER_ROW}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(arrays, unfinished, metadata={"key": key, "checksum": _checksum(arrays)})
        follow_umask(unfinished)
        unfinished.replace(path)
        _log.info("windows written to %s", path)
    except (OSError, SafetensorError) as error:
        _log.warning("the windows are not cached: %s cannot be written (%s)", path, error)
    finally:
        unfinished.unlink(missing_ok=True)


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a digest of names, kinds, shapes and numbers; it takes less time than reading the file."""
    from xxhash import xxh3_128

    digest = xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
