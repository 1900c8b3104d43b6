"""Results that are cheap to make again: backward makes them anew instead of the graph keeping them.

An operator offers what it returns together with a way to make it from tensors that the graph keeps anyway. Where such a
result would be kept for backward, under `Remaking`, the way is kept in its place. Nothing random is made again.
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
class _Offer:
    """A result that can be made again; it counts while the result lives unchanged."""

    result: weakref.ReferenceType[Tensor]
    version: int
    make: Make

    @property
    def holds(self) -> bool:
        """Whether memory at the result's address still is the result: addresses are used again."""
        result = self.result()
        return result is not None and result._version == self.version


_OFFERS: ContextVar[dict[int, _Offer] | None] = ContextVar("whet_offers", default=None)


def offer(result: Tensor, make: Make) -> None:
    """Say that `make` gives the result again, in every bit; without effect outside of `Remaking`.

    `make` runs without gradients and must not hold the result itself.
    """
    if torch.compiler.is_compiling():
        return
    offers = _OFFERS.get()
    if offers is not None:
        offers[_address(result)] = _Offer(weakref.ref(result), result._version, make)


class Remaking:
    """A context: what its forward pass keeps for backward is only what is not on offer."""

    def __enter__(self) -> None:
        self._token = _OFFERS.set({})
        self._hooks = saved_tensors_hooks(_keep, _give)
        self._casts = _Casts() if _autocast() else None
        self._hooks.__enter__()
        if self._casts is not None:
            self._casts.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._casts is not None:
            self._casts.__exit__(*error)
        self._hooks.__exit__(*error)
        _OFFERS.reset(self._token)


@dataclass(frozen=True)
class _Remade:
    """What the graph keeps in place of a tensor: how to make it, and which part of the result it is."""

    make: Make
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Casts(TorchDispatchMode):
    """Offers the copies that autocast makes of weights and of results on offer: they are what its products keep."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        make = _way_to(args[0]) if func is torch.ops.aten._to_copy.default else None
        if make is not None:
            dtype = out.dtype
            offer(out, lambda: make().to(dtype))
        return out


def _way_to(source: Tensor) -> Make | None:
    """Return how backward can have a tensor that a cast reads, None where it would have to be kept for that."""
    if isinstance(source, nn.Parameter):
        return lambda: source
    found = _offer_of(source)
    return found.make if found is not None and source.is_contiguous() else None


def _offer_of(tensor: Tensor) -> _Offer | None:
    """Return the offer of the result that this tensor is a view of."""
    found = (_OFFERS.get() or {}).get(_address(tensor))
    result = None if found is None or not found.holds else found.result()
    return found if result is not None and result.dtype == tensor.dtype else None


def _keep(tensor: Tensor) -> Tensor | _Remade:
    found = _offer_of(tensor)
    if found is None:
        return tensor
    return _Remade(found.make, tensor.size(), tensor.stride(), tensor.storage_offset())


def _give(kept: Tensor | _Remade) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.make().as_strided(kept.size, kept.stride, kept.offset)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")
