"""Fourteen files of the kinds that carry pickles; whoever unpickles one of them leaves a marker behind."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Trap:
    """Unpickled, it creates a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def _zip(pickled: bytes, inside: str, extra: dict[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(inside, pickled)
        for name, content in (extra or {"archive/version": b"3"}).items():
            archive.writestr(name, content)
    return file.getvalue()


def _torch(pickled: bytes) -> bytes:
    return _zip(pickled, "archive/data.pkl")


def _plain(pickled: bytes) -> bytes:
    return pickled


def _npy(pickled: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (117 - len(header)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled


def _npz(pickled: bytes) -> bytes:
    return _zip(_npy(pickled), "arr_0.npy", {})


def _tar(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            entry = tarfile.TarInfo(name)
            entry.size = len(pickled)
            archive.addfile(entry, io.BytesIO(pickled))
    return file.getvalue()


def _script(pickled: bytes) -> bytes:
    return _zip(pickled, "m/data.pkl", {"m/constants.pkl": pickled, "m/code/__torch__.py": b"", "m/version": b"3"})


CARRIERS: dict[str, Callable[[bytes], bytes]] = {
    "pytorch_model.bin": _torch,
    "model.pt": _torch,
    "model.pth": _plain,
    "model.ckpt": _torch,
    "model.pkl": _plain,
    "optimizer.pt": _torch,
    "scheduler.pt": _torch,
    "rng_state.pth": _torch,
    "training_args.bin": _torch,
    "object.npy": _npy,
    "arrays.npz": _npz,
    "model.joblib": _plain,
    "legacy.tar": _tar,
    ".metadata": _plain,
}
"""Name of the file -> how it wraps a pickle. TorchScript takes the place of another one's name in `as_weights`."""


def write(name: str, path: Path, marker: Path) -> None:
    """Write the carrier of this name to the path; unpickled, it creates the marker."""
    path.write_bytes(CARRIERS[name](pickle.dumps(Trap(marker))))


def write_script(path: Path, marker: Path) -> None:
    """Write a TorchScript archive."""
    path.write_bytes(_script(pickle.dumps(Trap(marker))))
