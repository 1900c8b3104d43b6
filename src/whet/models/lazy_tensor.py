"""Tensors whose numbers are computed when somebody reads them, and what has to stay unchanged until then.

`LazyStates` are hidden states (B, T, D) of which those that a pooling module reads are there. Pooling by the first or
the last token takes one hidden state a row, so the last block need not compute the others. But the encoder's caller
gets all of them, and may pass them on: `encode(output_value="token_embeddings")`, a loss of the user's own. Whoever
takes the states that are there gets these, and everybody else what the complete encoder computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from whet.errors import ConfigError

T = TypeVar("T")
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


class Alive(Generic[T]):
    """Objects that somebody still holds. Threads may add one while another one looks at all, unlike in a WeakSet."""

    def __init__(self) -> None:
        self._references: set[ref[T]] = set()

    def add(self, one: T) -> None:
        """Add an object, until nobody holds it."""
        self._references.add(ref(one, self._references.discard))

    def all(self) -> list[T]:
        """Return the objects."""
        copied = self._references.copy()  # one call of C, during which no other thread runs
        return [one for reference in copied if (one := reference()) is not None]


class Origin:
    """What a lazy tensor is computed from: weights and other tensors, which may change before it is read."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._tensors = tuple(one for one in tensors if one is not None)
        self._versions = self._versions_now()
        self._is_late = False
        _watch(self)

    @property
    def is_stale(self) -> bool:
        """Whether one of the tensors has changed: what is computed now is of another call.

        Writes through `tensor.data`, which torch does not count, are not seen.
        """
        return self._is_late or self._versions != self._versions_now()

    def stepped(self, parameters: frozenset[int]) -> None:
        """Take note that an optimizer has changed the parameters with these ids."""
        self._is_late |= any(id(one) in parameters for one in self._tensors)

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(version_of, self._tensors))


_OPEN: Alive[Origin] = Alive()
"""Those that a step of an optimizer concerns: torch's fused AdamW does not count that it writes to weights."""
_HOOKS: list[Any] = []


def _watch(origin: Origin) -> None:
    """Have steps of an optimizer that change the origin's tensors noticed."""
    _OPEN.add(origin)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    origins = _OPEN.all()
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


_TIMES = frozenset({Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul})
_GATHER = frozenset({Tensor.gather, torch.gather})


class Known:
    """The hidden states that are there, and how to get all.

    `tokens` (M, D) are the states; `places` (B, K) are the columns of each row that they belong to, `index` (B, K)
    which of them is there. `all_states` returns those of all places (B, T, D), with their graph.
    """

    def __init__(self, tokens: Tensor, places: Tensor, index: Tensor, all_states: Callable[[], Tensor]) -> None:
        self.tokens, self.places, self.index, self.all_states = tokens, places, index, all_states
        self.is_served = False
        """Whether somebody has taken some of the states that are there."""
        self.all: Tensor | None = None

    def at(self, columns: Tensor) -> Tensor | None:
        """Return the hidden states (B, D) at one column of each row (B,); None if one of them is not there."""
        found = self.places == columns.to(self.places.device)[:, None]
        if not bool(found.any(1).all()):
            return None
        self.is_served = True
        return self.tokens.index_select(0, self.index.gather(1, found.int().argmax(1, keepdim=True))[:, 0])


class LazyStates(LazyTensor):
    """Hidden states (B, T, D), times a factor that may have been put to them since."""

    _known: Known
    _factor: Tensor | None

    @staticmethod
    def of(known: Known, shape: Sequence[int]) -> Tensor:
        """Return the hidden states of this shape (B, T, D)."""
        return _lazy(known, shape, None)

    @property
    def is_open(self) -> bool:
        """Whether nobody has read all of these hidden states."""
        return self._known.all is None

    def computed(self) -> Tensor:
        """Return the hidden states of all places as an ordinary tensor; without a factor the same one each time."""
        if self._known.all is None:
            self._known.all = self._known.all_states()
        return self._known.all if self._factor is None else self._known.all * self._factor

    def without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return one state of each row, if it is there; also what a mask or a factor does to all; else None."""
        if not self.is_open or kwargs:
            return None
        if func in WATCHED and self._known.is_served:
            raise _unwatchable()
        if func is Tensor.expand_as and type(args[0]) is Tensor:
            return args[0].expand(self.shape)
        if func in _TIMES and len(args) == 2:
            return self._times(args[1] if args[0] is self else args[0])
        columns = _columns(func, args, self.shape)
        found = None if columns is None else self._known.at(columns)
        if columns is None or found is None:
            return None
        if self._factor is not None:
            found = found * self._factor.expand(self.shape)[torch.arange(len(columns), device=columns.device), columns]
        return found[:, None] if func in _GATHER else found

    def _times(self, factor: Any) -> Tensor | None:
        """Return these states times a factor that broadcasts to them; None if the product is another kind of tensor."""
        if type(factor) is not Tensor or factor.requires_grad or self._factor is not None:
            return None
        if factor.dtype != self.dtype or torch.broadcast_shapes(factor.shape, self.shape) != self.shape:
            return None
        return _lazy(self._known, self.shape, factor)


class _Lazy(Function):
    """Gives lazy states their place in the graph, for whoever reaches them below __torch_function__."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, known: Known, shape: Sequence[int], factor: Tensor | None) -> Tensor:
        ctx.known, ctx.factor = known, factor
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            LazyStates, torch.Size(shape), dtype=tokens.dtype, device=tokens.device
        )
        made._known, made._factor = known, factor
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        known, grad = ctx.known, grads[0] if ctx.factor is None else grads[0] * ctx.factor
        rows = torch.arange(len(grad), device=grad.device)[:, None].expand_as(known.places)
        taken = torch.zeros_like(grad)
        taken[rows, known.places] = grad[rows, known.places]
        if not torch.equal(taken, grad):
            raise _not_followed()
        found = torch.zeros_like(known.tokens)
        found[known.index] = grad[rows, known.places]
        return found, None, None, None


def _lazy(known: Known, shape: Sequence[int], factor: Tensor | None) -> Tensor:
    return _Lazy.apply(known.tokens, known, tuple(shape), factor)  # pyright: ignore[reportReturnType]


def _columns(func: Any, args: tuple[Any, ...], shape: Sequence[int]) -> Tensor | None:
    """Return which column of each row (B,) is taken, by states[:, place] or by gather; None for anything else."""
    given = args[1:]
    if func is Tensor.__getitem__ and isinstance(given[0], tuple) and len(given[0]) == 2:
        rows, place = given[0]
        whole = isinstance(rows, slice) and rows == slice(None) and type(place) is int
        if not whole or not -shape[1] <= place < shape[1]:
            return None
        return torch.full((shape[0],), place % shape[1], device="cpu")
    if func not in _GATHER or len(given) != 2 or given[0] not in (1, -2) or type(given[1]) is not Tensor:
        return None
    index: Tensor = given[1]
    is_one_place = index.shape == (shape[0], 1, shape[2]) and (index.stride(2) == 0 or shape[2] == 1)
    return index[:, 0, 0] if is_one_place else None


def _unwatchable() -> ConfigError:
    return ConfigError(
        what="these hidden states have no gradient of their own",
        got="a hook or retain_grad on token embeddings after their pooling",
        why="under whet.optimize the last block computes the tokens that pooling takes, and these alone",
        fix="put the hook on them before pooling, or use whet.optimize(model, last_block_tokens='all')",
    )


def _not_followed() -> ConfigError:
    return ConfigError(
        what="the gradient of these hidden states cannot be computed",
        got="a gradient of token embeddings from an autograd function that took them as they were",
        why="under whet.optimize the last block computes the tokens that pooling takes, and these alone",
        fix="use whet.optimize(model, last_block_tokens='all')",
    )
