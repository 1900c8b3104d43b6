"""Which calls read the hidden states of padding: all but those of which it is known that they do not."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import nn

from whet.config.arguments import PaddingInLoss

_FIRST_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
"""Ends of the names of transformers' classes that read the state of each row's first token alone."""
_CALLED: ContextVar[tuple[nn.Module, ...]] = ContextVar("whet_first_token_heads", default=())
"""The models of this kind whose forward runs in this thread, the innermost last."""


def apply(model: nn.Module) -> None:
    """Note calls of a model that reads first tokens alone: these do without the states of padding.

    Calls of its encoder from elsewhere do not.
    """
    if type(model).__module__.startswith("transformers.") and type(model).__name__.endswith(_FIRST_TOKEN_HEADS):
        model.register_forward_pre_hook(_begin, prepend=True)
        model.register_forward_hook(_end, always_call=True)


def restore(model: nn.Module) -> None:
    """Undo `apply`, exactly."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (_begin, _end)]:
            del hooks[number]
            model._forward_hooks_always_called.pop(number, None)


def amount(model: nn.Module, asked: PaddingInLoss) -> PaddingInLoss:
    """Return what this call needs: nothing if only first tokens are read, and no hook looks at the encoder's output."""
    encoder: Any = model.base_model
    seen = encoder._forward_hooks or nn.modules.module._global_forward_hooks
    return "none" if model in _CALLED.get() and not seen and "forward" not in model.__dict__ else asked


def _begin(model: nn.Module, _: Any) -> None:
    _CALLED.set((*_CALLED.get(), model))


def _end(*_: Any) -> None:
    _CALLED.set(_CALLED.get()[:-1])
