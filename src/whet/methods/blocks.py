"""The blocks that a model is a stack of, and how one runs without what transformers puts around it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.models.families import is_one_of
from whet.models.packed import PackedModel


def find(model: nn.Module, packed: PackedModel | None) -> list[nn.Module]:
    """Return the blocks of the model's family, or else the members of its lists of equal modules; there may be none."""
    if packed is not None:
        return [module for module in model.modules() if is_one_of(module, packed.family.blocks)]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _is_stack(module)]
    inner = {id(below) for one in lists for block in one for below in block.modules()}
    return [block for one in lists if id(one) not in inner for block in one]


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, without the checkpoint that transformers puts around its blocks."""
    forward = type(module).forward
    if isinstance(module, GradientCheckpointingLayer):
        own = forward.__code__.co_name == "forward_with_checkpointing"  # not one that somebody has put around it
        forward = getattr(forward, "__wrapped__", forward) if own else forward
    return MethodType(forward, module)


def unbound(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward as a function that takes the module first."""
    if isinstance(forward, MethodType):
        return forward.__func__
    return lambda _, *args, **options: forward(*args, **options)


def _is_stack(modules: nn.ModuleList) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1
