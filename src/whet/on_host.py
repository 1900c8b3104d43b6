"""Batches on their way to a GPU, and what the host still knows of them afterwards.

A GPU computes behind the program that launches its kernels. To read a number back, the program waits until all of them
have run, and the GPU then waits for the program. So small whole-number tensors, such as ids, masks and labels, keep a
copy on the host for as long as they live.
Source: PyTorch documentation, "CUDA semantics", asynchronous execution and pinned memory buffers.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_LARGEST = 16 * 2**20
"""Bytes of a tensor that is copied once more to keep it."""


@dataclass(frozen=True)
class _Copy:
    values: Tensor
    version: int
    place: int

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether the tensor still holds these values: nothing was written into it, and it lies where it did."""
        return (self.version, self.place) == (_version(tensor), tensor.data_ptr())


_COPIES: Any = WeakTensorKeyDictionary()
"""Tensor on a device -> its copy."""


def on_host(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the CPU; a copy that is known is not read back. Nobody may write into it."""
    if (known := at_hand(tensor)) is not None:
        return known
    values = tensor.detach().cpu()
    _keep(tensor, values)
    return values


def at_hand(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the CPU, as `on_host` does; None if they would have to be read back."""
    if tensor.device.type in ("cpu", "meta"):
        return tensor
    found: _Copy | None = _COPIES.get(tensor)
    return found.values if found is not None and found.is_of(tensor) else None


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; a GPU is not waited for, and the tensor may be written into at once."""
    if device.type != "cuda":
        return values.to(device)
    return _pinned(values).to(device, non_blocking=True)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; the host knows whole numbers. Nobody may write into it afterwards."""
    found = values.to(device, non_blocking=True)
    if found is not values and _is_small(values):
        _keep(found, values)
    return found


def sent_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch whose whole-number tensors are on a GPU and known to the host; the others are left as they are."""
    if device.type != "cuda" or not isinstance(batch, MutableMapping):
        return batch
    found = copy.copy(batch)  # transformers' BatchEncoding keeps more than its tensors
    found.update({name: _sent(value, device) for name, value in batch.items() if _is_small(value)})
    return found


def _sent(values: Tensor, device: torch.device) -> Tensor:
    pinned = _pinned(values)
    found = pinned.to(device, non_blocking=True)
    _keep(found, pinned)
    return found


def _pinned(values: Tensor) -> Tensor:
    """Return a copy that a GPU reads later; torch keeps its memory until then."""
    return torch.empty_like(values, pin_memory=True, memory_format=torch.contiguous_format).copy_(values)


def _keep(tensor: Tensor, values: Tensor) -> None:
    version = _version(tensor)
    if version is not None:
        _COPIES[tensor] = _Copy(values, version, tensor.data_ptr())


def _version(tensor: Tensor) -> Any:
    """Return a number that grows with each write; None for a tensor of inference mode, which has none."""
    return None if tensor.is_inference() else tensor._version


def _is_small(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and not (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.nbytes <= _LARGEST
    )
