"""Cheap results that backward recomputes, so that autograd need not save them.

An operator registers its result together with a function that recomputes it from tensors that autograd saves anyway.
Under `Recomputing`, autograd saves the function instead of the result. Nothing random is recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

Make = Callable[[], Tensor]


@dataclass(frozen=True)
class _Entry:
    """A registered result. It is valid while the result lives unchanged."""

    result: weakref.ReferenceType[Tensor]
    version: int
    make: Make

    @property
    def is_valid(self) -> bool:
        """Whether the memory at the result's address still holds the result: addresses are reused."""
        result = self.result()
        return result is not None and result._version == self.version


_ENTRIES: ContextVar[dict[int, _Entry] | None] = ContextVar("whet_recomputable_results", default=None)


def register(result: Tensor, make: Make) -> None:
    """Register `make`, which recomputes the result bitwise. It has no effect outside of `Recomputing`.

    `make` runs without gradients and must not hold a reference to the result.
    """
    if torch.compiler.is_compiling():
        return
    entries = _ENTRIES.get()
    if entries is not None:
        entries[_address(result)] = _Entry(weakref.ref(result), result._version, make)


class Recomputing:
    """A context whose forward pass saves for backward only what is not registered."""

    def __enter__(self) -> None:
        self._token = _ENTRIES.set({})
        self._hooks = saved_tensors_hooks(_pack, _unpack)
        self._casts = _Casts() if _autocast() else None
        self._hooks.__enter__()
        if self._casts is not None:
            self._casts.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._casts is not None:
            self._casts.__exit__(*error)
        self._hooks.__exit__(*error)
        _ENTRIES.reset(self._token)


@dataclass(frozen=True)
class _Recipe:
    """What autograd saves instead of a tensor: how to recompute it, and which part of the result it is."""

    make: Make
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Casts(TorchDispatchMode):
    """Registers the copies that autocast makes of weights and of registered results: its products save those."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        make = _recipe_of(args[0]) if func is torch.ops.aten._to_copy.default else None
        if make is not None:
            dtype = out.dtype
            register(out, lambda: make().to(dtype))
        return out


def _recipe_of(source: Tensor) -> Make | None:
    """Return how backward can get a tensor that a cast reads; None if it would have to be saved for that."""
    if isinstance(source, nn.Parameter):
        return lambda: source
    found = _entry_of(source)
    return found.make if found is not None and source.is_contiguous() else None


def _entry_of(tensor: Tensor) -> _Entry | None:
    """Return the entry of the result that this tensor is a view of."""
    found = (_ENTRIES.get() or {}).get(_address(tensor))
    result = None if found is None or not found.is_valid else found.result()
    return found if result is not None and result.dtype == tensor.dtype else None


def _pack(tensor: Tensor) -> Tensor | _Recipe:
    found = _entry_of(tensor)
    if found is None:
        return tensor
    return _Recipe(found.make, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(kept: Tensor | _Recipe) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.make().as_strided(kept.size, kept.stride, kept.offset)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")
