"""Tensors whose numbers are computed when somebody reads them, and what has to stay unchanged until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

Step = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""Something done to a lazy tensor: a function of torch with its other arguments."""

_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf"),
    *("is_cuda", "is_sparse", "is_quantized", "is_meta"),
)
_KNOWN_AT_ONCE = frozenset({
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
    Tensor.get_device, Tensor.element_size, torch.numel, torch.is_floating_point, torch.is_complex,
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
})  # fmt: skip
"""What a tensor says about itself without its numbers."""
WATCHED = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""What asks for the gradient of a tensor itself."""


class Origin:
    """What a lazy tensor is computed from: weights and other tensors, which may change before it is read."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._tensors = tuple(one for one in tensors if one is not None)
        self._versions = self._versions_now()
        self._is_late = False
        _watch(self)

    @property
    def is_stale(self) -> bool:
        """Whether one of the tensors has changed: what is computed now is of another call."""
        return self._is_late or self._versions != self._versions_now()

    def stepped(self, parameters: frozenset[int]) -> None:
        """Take note that an optimizer has changed the parameters with these ids."""
        self._is_late |= any(id(one) in parameters for one in self._tensors)

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(version_of, self._tensors))


_OPEN: WeakSet[Origin] = WeakSet()
"""Those that a step of an optimizer concerns: torch's fused AdamW does not count that it writes to weights."""
_HOOKS: list[Any] = []


def _watch(origin: Origin) -> None:
    """Have steps of an optimizer that change the origin's tensors noticed."""
    _OPEN.add(origin)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    origins = list(_OPEN)
    if origins:
        stepped = frozenset(id(one) for group in optimizer.param_groups for one in group["params"])
        for origin in origins:
            origin.stepped(stepped)


def version_of(tensor: Tensor) -> int:
    """Return how often somebody has written to the tensor, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


class LazyTensor(Tensor):
    """A tensor that knows its shape, and computes its numbers when a function of torch needs them."""

    def computed(self) -> Tensor:
        """Return the same as an ordinary tensor, the same one each time."""
        raise NotImplementedError

    def without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the function gives, if that takes no numbers but those that are there; else None.

        `self` is the first lazy tensor among the arguments.
        """
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        if func in _KNOWN_AT_ONCE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, LazyTensor)), None)
        found = None if first is None else first.without_numbers(func, args, kwargs)
        if found is not None:
            return found
        args, kwargs = pytree.tree_map_only(LazyTensor, lambda one: one.computed(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Serve what does not ask __torch_function__, as autograd functions: with numbers, without gradients."""
        with torch.no_grad():
            args, kwargs = pytree.tree_map_only(LazyTensor, lambda one: one.computed().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)
