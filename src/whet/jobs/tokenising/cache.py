"""Tokenised rows kept on disk, under a name made from everything that they depend on."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.jobs.tokenising.encode import rust_tokenizer
from whet.paths import default_cache_dir
from whet.system import follow_umask

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("whet")
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where rows of one kind are kept.

    The cache is `folder`, else `$XDG_CACHE_HOME/whet`, else `~/.cache/whet`. With `overwrite` rows are made again even
    if they are there, except in a process that had to wait for another: it takes what that one has just made.
    """

    rows: str
    """What the rows are called in messages and file names, such as windows."""
    folder: Path | None = None
    overwrite: bool = False

    def take(self, key: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays with this key: from the disk if they are there, else from `make`, and keep them.

        Of several processes that want the same rows one makes them; the others wait and read. A damaged file is made
        again. If nothing can be written, the rows are made and not kept.
        """
        folder = self.folder or default_cache_dir()
        if folder is None:
            _warn_once(f"no home folder: the {self.rows} are not cached (set XDG_CACHE_HOME)")
            return make()
        path = folder / f"{self.rows}-{key}.safetensors"
        if not self.overwrite and (found := self._read(path, key, warn=False)) is not None:
            return found
        lock, waited = self._lock(path)
        try:
            if (waited or not self.overwrite) and (found := self._read(path, key, warn=True)) is not None:
                return found
            made = make()
            if lock is not None:
                self._write(path, key, made)
            return made
        finally:
            if lock is not None:
                lock.release()

    def _lock(self, path: Path) -> tuple[BaseFileLock | None, bool]:
        """Return the lock of this file, held, and whether another process had it; None if nothing can be written."""
        from filelock import FileLock, Timeout

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{path}.lock")
            try:
                lock.acquire(timeout=0)
                return lock, False
            except Timeout:
                _log.info("waiting for another process that makes the same %s (%s)", self.rows, path)
                lock.acquire()
                return lock, True
        except (OSError, NotImplementedError) as error:  # the second: a file system without locks
            _warn_once(f"the {self.rows} are not cached: {path.parent} cannot be written ({error})")
            return None, False

    def _read(self, path: Path, key: str, *, warn: bool) -> Arrays | None:
        """Return the arrays in this file; None if there is none or it is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            if not path.is_file():
                return None
        except OSError:  # a folder that this user may not enter: `_lock` says so
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
            _log.log(logging.WARNING if warn else logging.DEBUG, "%s is damaged, and made again: %s", path, reason)
            return None
        _log.info("%s read from %s", self.rows, path)
        return arrays

    def _write(self, path: Path, key: str, arrays: Arrays) -> None:
        """Keep the arrays in this file, completely or not at all. To be called with its lock held."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file(kept, unfinished, metadata={"key": key, "checksum": _checksum(kept)})
            follow_umask(unfinished)
            unfinished.replace(path)
            _log.info("%s written to %s", self.rows, path)
        except (OSError, SafetensorError) as error:
            _log.warning("the %s are not cached: %s cannot be written (%s)", self.rows, path, error)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


@functools.cache
def _warn_once(text: str) -> None:
    """Log this for the first of the splits that it concerns."""
    _log.warning("%s", text)


class Key:
    """A name of 32 hex digits for rows, made from everything that they depend on: code, tokenizer, options, texts."""

    def __init__(self, layout: int, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        import tokenizers
        from xxhash import xxh3_128

        settings = {
            "layout": layout,
            "tokenizers": tokenizers.__version__,
            "options": dict(options),
            "tokenizer": [
                tokenizer.padding_side,
                tokenizer.truncation_side,
                tokenizer.model_input_names,
                tokenizer.cls_token_id,
                tokenizer.bos_token_id,
                bool(getattr(tokenizer, "split_special_tokens", False)),
            ],
        }
        self._digest = xxh3_128()
        # the copy, because the tokenizer's own Rust part remembers the truncation and padding of its last call
        self.add_texts([json.dumps(settings, sort_keys=True), rust_tokenizer(tokenizer).to_str()])

    def add_texts(self, texts: Sequence[str]) -> None:
        """Let the name depend on these texts."""
        self.add_numbers([len(text) for text in texts])
        self._digest.update("".join(texts).encode("utf-8", "surrogatepass"))

    def add_numbers(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Let the name depend on these whole numbers."""
        array = np.asarray(numbers, dtype="<i8")
        self._digest.update(len(array).to_bytes(8, "little"))
        self._digest.update(array.tobytes())

    def hex(self) -> str:
        """Return the name."""
        return self._digest.hexdigest()


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a digest of names, kinds, shapes and numbers; it takes less time than reading the file."""
    from xxhash import xxh3_128

    digest = xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
