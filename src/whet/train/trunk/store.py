"""Numbers of a run kept in a file without a name, which the system removes with the run, however that ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.errors import StorageError
from whet.store.snapshot import free_bytes

_MB = 1e6


def stored(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Return a tensor of zeros whose memory is a file on the disk of the folder, complete from the beginning.

    Raises StorageError if the disk has no room: a file that grew later would end the process instead.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if free_bytes(folder) < size:
                raise OSError("too few free bytes")
            os.posix_fallocate(file.fileno(), 0, size)
            numbers = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    except OSError as error:
        raise StorageError(
            what="the disk has no room for the hidden states of the frozen layers",
            got=f"{size / _MB:,.1f} MB needed, {free_bytes(folder) / _MB:,.1f} MB free in {folder}: {error}",
            why="cache_frozen_trunk keeps the states of all tokens of the training data",
            fix="name another disk in --output_dir, or leave --cache_frozen_trunk out",
        ) from error
    return torch.from_numpy(numbers).view(dtype).view(shape)
