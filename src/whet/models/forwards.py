"""Forwards that a module gets in place of its class's: bound so that copies and pickles of the module have them too.

Python pickles a bound method by its name, as an attribute of the object's class, where whet's functions are not.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Signature, signature
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_AROUND = {
    "torch.amp.autocast_mode": None,
    "accelerate.utils.operations": None,
    "trl.trainer.utils": "_fused_forward",
}
"""Where functions are written that may stand around a forward, and the name of the one that may; None: all."""
_MIXED_PRECISION = "accelerate.utils.operations"
"""Where the outermost function is written that accelerate puts around a forward for its number format."""


def bind(forward: Callable[..., Any], module: nn.Module, *, signed: bool = False) -> MethodType:
    """Return the forward as a method of this module; `signed`: with the signature that the class's forward has.

    Trainers and libraries read the names of a model's columns there.
    """
    if signed:
        forward = _signed(forward, type(module))
    copyreg.pickle(MethodType, _reduced)  # type: ignore[arg-type]
    ForkingPickler.register(MethodType, _reduced)  # what multiprocessing sends has reducers of its own
    return MethodType(forward, module)


def instance_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that the module itself has, from `bind` or from somebody else; None: it has its class's."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "__func__", forward)


@dataclass
class Replaced:
    """Forwards that modules got, with what each module had before, to put that back."""

    before: list[tuple[nn.Module, Any]] = field(default_factory=list)
    """Modules with the forward of their own that they had; None: that of their class."""

    def put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give the module this forward."""
        self.before.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def undo(self) -> None:
        """Give all modules back what they had."""
        for module, forward in reversed(self.before):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


def take_off_mixed_precision(module: nn.Module) -> None:
    """Give the module the forward that it had before accelerate put autocast, and a cast of its outputs, around it."""
    while home_of(instance_forward(module)) == _MIXED_PRECISION:
        around: Any = module.__dict__.pop("forward")
        inner = around.__wrapped__.model_forward.__wrapped__
        if inner is not type(module).forward:
            module.forward = MethodType(inner, module) if isinstance(around, MethodType) else inner


def other_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that computes in place of the class's forward; None if that one does.

    Mixed precision of accelerate stands around a model's forward and casts what it returns, and nothing else. TRL's
    trainers of language models put one around it that may read the hidden states of tokens with a label by itself.
    """
    found = instance_forward(module)
    while found is not None and _reads_as_the_class(found):
        found = found.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    found = getattr(found, "__func__", found)
    return None if found is type(module).forward else found


def _reads_as_the_class(forward: Any) -> bool:
    """Return whether a function around a forward needs no hidden states but those that the forward reads."""
    code = getattr(forward, "__code__", None)
    home = type(forward).__module__ if code is None else Path(code.co_filename).with_suffix("").as_posix()
    home, name = home.replace("/", "."), None if code is None else code.co_name
    known = any(home.endswith(place) and only in (None, name) for place, only in _AROUND.items())
    return known and hasattr(forward, "__wrapped__")


def class_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, without the checkpoint that transformers puts around its blocks."""
    forward = type(module).forward
    if isinstance(module, GradientCheckpointingLayer):
        own = forward.__code__.co_name == "forward_with_checkpointing"  # not one that somebody has put around it
        forward = getattr(forward, "__wrapped__", forward) if own else forward
    return MethodType(forward, module)


def as_function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward as a function that takes the module first."""
    if isinstance(forward, MethodType):
        return forward.__func__
    return lambda _, *args, **options: forward(*args, **options)


def home_of(function: Any) -> str:
    """Return the module in which a function, or the one inside a partial, is defined; empty if it names none."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def is_whets(forward: Any) -> bool:
    """Return whether whet has defined the function."""
    return home_of(forward).startswith("whet.")


def _reduced(method: MethodType) -> Any:
    function, is_signed = method.__func__, isinstance(getattr(method.__func__, "__signature__", None), Signature)
    if is_whets(function):
        return _again, (function.__wrapped__ if is_signed else function, method.__self__, is_signed)
    return method.__reduce__()


def _again(forward: Callable[..., Any], module: nn.Module, signed: bool) -> MethodType:
    return bind(forward, module, signed=signed)


@cache
def _signed(forward: Callable[..., Any], cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward with the signature of the class's own."""

    def with_signature(self: nn.Module, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **options)

    with_signature.__signature__ = signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]
    with_signature.__wrapped__ = forward  # pyright: ignore[reportFunctionMemberAccess]
    return with_signature
