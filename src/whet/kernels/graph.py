"""Operators inside a compiled graph: torch.compile keeps them in it without looking inside.

An operator's file declares it by `operator`, and `register` makes it one of torch's, `torch.ops.whet.NAME`. It calls
the same functions as eager execution. An operator of torch takes and returns tensors and numbers only, and always the
same number of tensors, none of which share memory: an empty tensor stands for no result.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.library import custom_op

from whet import delayed_imports
from whet.kernels.batch_position import Drop, KeyedPosition
from whet.kernels.operator import DTYPES

P = ParamSpec("P")
T = TypeVar("T")


def outside(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that graphs break around, by torch.compiler.disable.

    It imports torch's compiler, which takes half a second. A command waits until somebody else has imported it: nothing
    is compiled before.
    """
    if not delayed_imports.are_on():
        return torch.compiler.disable(reason=reason)

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        disabled = cache(lambda: torch.compiler.disable(function, reason=reason))

        @wraps(function)
        def run(*values: P.args, **named: P.kwargs) -> T:
            called: Any = disabled() if "torch._dynamo" in sys.modules else function
            return called(*values, **named)

        return run

    return decorated


class Traced:
    """What graphs under tracing may contain; `methods/compile_blocks.py` sets it."""

    operators = False
    """Whether the operators are registered. Graphs compiled by others contain plain torch."""
    native = False
    """Whether the native library can run them."""


_DECLARED: list[Callable[[], object]] = []
"""What registers the operators that are not registered yet: it takes 4 ms each."""
_REGISTERED: list[object] = []


def operator(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    schema: str | None = None,
    save: Callable[..., None] | None = None,
    gradient: Callable[..., Any] | None = None,
) -> None:
    """Declare the operator `whet::name`: `run`, whose annotations are its signature, or a schema as torch writes it.

    `fake` takes its arguments and returns its results not yet computed, for their shapes. `save` (ctx, inputs, output)
    and `gradient` (ctx, *gradients of the results) are as in an autograd Function.
    """

    def made() -> object:
        found = custom_op(f"whet::{name}", run, mutates_args=(), schema=schema)
        found.register_fake(fake)
        if gradient is not None:
            found.register_autograd(gradient, setup_context=save)
        return found

    _DECLARED.append(made)
    if _REGISTERED:
        register()


def register() -> None:
    """Register all operators that are declared; whoever makes graphs calls it before."""
    while _DECLARED:
        _REGISTERED.append(_DECLARED.pop()())


def holds(*tensors: Tensor | None, drop: Drop | None = None) -> bool:
    """Return whether a graph is being traced and can contain the native operator for these tensors."""
    if not (in_graph(drop) and Traced.native):
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.device.type == "cpu" and t.dtype in DTYPES and t.dtype == given[0].dtype for t in given)


def in_graph(drop: Drop | None) -> bool:
    """Return whether a block is being traced, and operators can read the dropout's position."""
    if not (torch.compiler.is_compiling() and Traced.operators):
        return False
    return drop is None or drop.p == 0.0 or isinstance(drop.position, KeyedPosition)


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return the tensor; an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor


def shaped_as(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return a new tensor of the same shape and dtype; an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


def or_none(tensor: Tensor, *, wanted: bool) -> Tensor | None:
    """Return the tensor if it is wanted."""
    return tensor if wanted else None
