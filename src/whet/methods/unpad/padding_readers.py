"""Which calls read the hidden states of padding, and how exact these have to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.config.fields import PaddingInLoss
from whet.methods.unpad import calls as unpad_calls
from whet.models import bad_batch
from whet.models.forwards import other_forward
from whet.models.packable import predicts_next_tokens
from whet.models.packed import packed_model
from whet.objectives import heads

_FIRST_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
"""Ends of the names of transformers' classes that read the state of each row's first token alone."""
_SPAN_LABELS = ("start_positions", "end_positions")
_IGNORED = -100


@dataclass(frozen=True)
class _Call:
    """A running call of a model, and what its targets say about the states of padding."""

    model: nn.Module
    targets_in_padding: bool
    runs: bool
    """Whether the model's forward runs, and not a loss of the user's, which may call its parts."""


_CALLED: ContextVar[tuple[_Call, ...]] = ContextVar("whet_called_heads", default=())
"""The calls of optimised models that run in this thread, the innermost last."""


def apply(model: nn.Module) -> None:
    """Look at each call of the model: it may read first tokens alone, or have targets at padding tokens.

    Calls of its encoder from elsewhere are not seen.
    """
    if model is not model.base_model:
        model.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)  # pyright: ignore[reportArgumentType]
        model.register_forward_hook(_end, always_call=True)  # pyright: ignore[reportArgumentType]


def restore(model: nn.Module) -> None:
    """Undo `apply`, exactly."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (_begin, _end)]:
            del hooks[number]
            model._forward_hooks_always_called.pop(number, None)
            model._forward_pre_hooks_with_kwargs.pop(number, None)


def amount(model: nn.Module, asked: PaddingInLoss) -> PaddingInLoss:
    """Return what the running call needs: each padding token's own state if it has targets there, else what was asked.

    Nothing if only first tokens are read, and no hook looks at the encoder's output.
    """
    calls = [call for call in _CALLED.get() if call.model is model]
    if any(call.targets_in_padding for call in calls):
        return "all"
    if predicts_next_tokens(model):
        return "none"
    encoder: Any = model.base_model
    seen = encoder._forward_hooks or nn.modules.module._global_forward_hooks
    return "none" if calls and _reads_first_tokens(model) and not seen and other_forward(model) is None else asked


def usual_amount(model: nn.Module, asked: PaddingInLoss) -> PaddingInLoss:
    """Return what calls of the model need whose labels are not at padding, if no hook looks at the encoder's output."""
    return "none" if predicts_next_tokens(model) or _reads_first_tokens(model) else asked


def read_first_tokens_alone(model: nn.Module) -> bool:
    """Return whether the model's forward runs, and reads no hidden state but that of each row's first token."""
    runs = any(call.model is model and call.runs for call in _CALLED.get())
    return runs and heads.reads_beside(model) == "first tokens"


def amount_of(model: nn.Module, asked: PaddingInLoss, inputs: Mapping[str, Any]) -> PaddingInLoss:
    """Return what a call of the model with these inputs will need."""
    with targets_of(model, inputs):
        return amount(model, asked)


@contextmanager
def targets_of(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Note a batch's targets while a loss of a user's own runs: it may keep them from the model."""
    token = _CALLED.set((*_CALLED.get(), _Call(model, targets_in_padding(inputs), runs=False)))
    try:
        yield
    finally:
        _CALLED.reset(token)


def targets_in_padding(call: Mapping[str, Any]) -> bool:
    """Return whether a call's labels, or its start or end positions, are at padding tokens."""
    mask = call.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    padding = mask == 0
    labels = [value for name, value in call.items() if name.endswith("labels") and isinstance(value, Tensor)]
    if any(bool(((one != _IGNORED) & padding.to(one.device)).any()) for one in labels if one.shape == mask.shape):
        return True
    places = [call[name] for name in _SPAN_LABELS if isinstance(call.get(name), Tensor)]
    return any(_is_at(place.reshape(-1), padding) for place in places if place.numel() == len(mask))


def _is_at(place: Tensor, padding: Tensor) -> bool:
    """Return whether a place (B,) is at padding; one behind the last column is no target, as heads have it."""
    inside = place < padding.shape[1]
    column = place.clamp(0, padding.shape[1] - 1).to(padding.device)
    return bool((padding.gather(1, column[:, None].long())[:, 0] & inside.to(padding.device)).any())


def _reads_first_tokens(model: nn.Module) -> bool:
    packed = packed_model(model)
    if packed is not None and packed.family.proven:
        return False  # a head of an unknown family may average its tokens, whatever its name
    if not heads.pools_first_tokens(model):
        return False
    return type(model).__module__.startswith("transformers.") and type(model).__name__.endswith(_FIRST_TOKEN_HEADS)


@torch.compiler.disable
def _begin(model: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    call = unpad_calls.named(model, given, options) or options
    followed = unpad_calls.is_followed()
    _CALLED.set((*_CALLED.get(), _Call(model, not followed and targets_in_padding(call), runs=True)))
    if not followed:
        _require_fitting_labels(model, call)


def _require_fitting_labels(model: nn.Module, call: Mapping[str, Any]) -> None:
    """Raise DataError for labels that the model's loss cannot take: after the loss, only torch's own error is left."""
    ids = call.get("input_ids")
    if not type(model).__module__.startswith("transformers."):
        return  # labels of a class of a user's own may mean anything
    if isinstance(ids, Tensor) and (found := bad_batch.odd_labels(model, ids, call)) is not None:
        raise found


@torch.compiler.disable
def _end(*_: Any) -> None:
    _CALLED.set(_CALLED.get()[:-1])
