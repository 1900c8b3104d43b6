"""The blocks that a model is a stack of, and how one runs without what transformers puts around it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.models.view import ModelView


def find(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model; there may be none."""
    return [module for _, module in ModelView(model).blocks()]


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
