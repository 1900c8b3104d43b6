"""Hidden states (B, T, D) of which those that a pooling module reads are there, and all others computed when read.

Pooling by the first or the last token takes one hidden state a row, so the last block need not compute the others. But
the encoder's caller gets all of them in hand, and may pass them on: `encode(output_value="token_embeddings")`, a loss
of the user's own. `LazyStates` gives whoever takes the states that are there these, and everybody else what the
complete encoder computes, in a second pass with the masks of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from whet.errors import ConfigError
from whet.models.lazy_tensor import WATCHED, LazyTensor

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
            found = found * self._factor.expand(self.shape)[torch.arange(len(columns)), columns]
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
        return torch.full((shape[0],), place % shape[1]) if whole and -shape[1] <= place < shape[1] else None
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
