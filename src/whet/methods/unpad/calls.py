"""Which calls of an encoder can run without their padding, and which read the hidden states of padding.

The first is decided by what a call gives and what it asks for. The second by the model's head and the call's labels: it
says how exact the hidden states of padding have to be.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.config.fields import PaddingInLoss
from whet.data import sequences
from whet.kernels.graph import outside
from whet.kernels.operator import is_followed
from whet.models import attention, bad_batch
from whet.models.forwards import other_forward
from whet.models.fused.limits import NO_EFFECT
from whet.models.packable import predicts_next_tokens
from whet.models.packed import packed_model
from whet.objectives import heads
from whet.on_host import on_host

_IDS = (torch.int64, torch.int32)
_COLUMNS = ("token_type_ids", "position_ids")
_OUTPUTS = ("output_attentions", "output_hidden_states")


def named(encoder: Any, given: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the call's arguments by name, without those that are None; None if the encoder takes no such call."""
    names = _names(type(encoder))[: len(given)]
    if len(names) < len(given) or any(name in options for name in names):
        return None
    arguments = dict(zip(names, given, strict=True)) | dict(options)
    return {name: value for name, value in arguments.items() if value is not None}


def why_padded(encoder: Any, call: Mapping[str, Any] | None, *, causal: bool = False) -> str | None:
    """Return what about the call needs its padding, for the log; None if it can run without.

    `causal`: the encoder is the stack of blocks of a causal language model.
    """
    if call is None or not _are_ids(call.get("input_ids")):
        return "calls without input_ids (rows, places)"
    ids: Tensor = call["input_ids"]
    if is_followed() or type(ids) is not Tensor or ids.is_meta:
        return "calls that a tracer or a transform of torch follows"
    config = encoder.config
    if any(_asked(config, call, name) for name in _OUTPUTS):
        return "calls that ask for hidden states or attention weights of all layers"
    if not attention.is_routed(config):
        return "models whose attention implementation was changed afterwards"
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        return "attention masks of another shape than input_ids"
    if (name := _own_ids(encoder, call)) is not None:
        return f"models whose {name}, of calls that give none, were changed"
    odd = [name for name, value in call.items() if not _is_understood(encoder, name, value, ids, causal=causal)]
    if odd:
        return f"calls with {', '.join(odd)}"
    if (named := sequences.names_sequences(call)) and mask is not None and not bool(on_host(mask).all()):
        return f"calls with {', '.join(named)} and padding in attention_mask: give one of the two"
    if bool(call.get("is_causal", getattr(config, "is_causal", causal))) != causal:
        return f"calls with a {'bidirectional' if causal else 'causal'} mask"
    return _why_cached(encoder, call) if causal else None


def _own_ids(encoder: Any, call: Mapping[str, Any]) -> str | None:
    """Return which ids the embeddings take from a buffer of theirs that is another than transformers makes it."""
    buffers = getattr(getattr(encoder, "embeddings", None), "_buffers", {})
    for name, usual in (("position_ids", torch.arange), ("token_type_ids", torch.zeros)):
        ids = buffers.get(name)
        if isinstance(ids, Tensor) and call.get(name) is None:
            own = on_host(ids).flatten()
            if not torch.equal(own, _usual_ids(usual, own.numel(), own.dtype)):
                return name
    return None


@cache
def _usual_ids(make: Callable[..., Tensor], n: int, dtype: torch.dtype) -> Tensor:
    return make(n, dtype=dtype, device="cpu")


def _why_cached(decoder: Any, call: Mapping[str, Any]) -> str | None:
    """Return why a decoder's call needs its padding: its caller may want the keys and values of all places."""
    # By default decoders keep them outside of training; nobody continues several sequences in a row.
    by_default = getattr(decoder.config, "use_cache", False) and not decoder.training
    wanted = call.get("use_cache", by_default and not sequences.names_sequences(call))
    return "calls that keep keys and values (use_cache): set config.use_cache = False" if wanted else None


def keeps_cache(decoder: Any, call: Mapping[str, Any]) -> bool:
    """Return whether transformers' own forward would keep keys and values in this call: then no position splits a row.

    In training too, unless it checkpoints; whet then has no use for them.
    """
    checkpoints = getattr(decoder, "gradient_checkpointing", False) and decoder.training and torch.is_grad_enabled()
    return bool(call.get("use_cache", getattr(decoder.config, "use_cache", False))) and not checkpoints


def see_each_other(decoder: Any, call: Mapping[str, Any]) -> str | None:
    """Return what lets sequences with positions of their own see each other in a decoder's call; None: nothing does.

    transformers then reads a row as one sequence, and so does whet.
    """
    if sequences.names_sequences(call):
        return None
    cause = "attention_mask" if call.get("attention_mask") is not None else "use_cache"
    if cause == "use_cache" and not keeps_cache(decoder, call):
        return None
    mask, ids = call.get("attention_mask"), call.get("input_ids")
    if isinstance(mask, Tensor):
        fits = isinstance(ids, Tensor) and mask.shape == ids.shape
        if not fits or not bool(on_host(mask).all()):
            return None
    return cause if sequences.restart(call.get("position_ids")) else None


def require_kept_apart(encoder: Any, call: Mapping[str, Any], why: str, *, causal: bool) -> None:
    """Refuse a call that runs with transformers' own forward, which would mix the sequences that the call names."""
    if not is_followed():
        splits = causal and call.get("attention_mask") is None and not keeps_cache(encoder, call)
        own = str(getattr(encoder.config, "_attn_implementation", ""))
        sequences.require_kept_apart(call, why, attention=own, by_position=splits)


def wants_tuple(encoder: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a call with these options wants a plain tuple, as they or the encoder's configuration say."""
    return options.get("return_dict", getattr(encoder.config, "return_dict", True)) is False


@cache
def _parameters(encoder: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the encoder's forward, by name."""
    parameters = list(inspect.signature(encoder.forward).parameters.values())[1:]  # pyright: ignore
    return {one.name: one for one in parameters}


@cache
def _takes_more(encoder: type) -> bool:
    """Return whether the encoder's forward takes arguments that it does not name."""
    return any(one.kind is one.VAR_KEYWORD for one in _parameters(encoder).values())


@cache
def _names(encoder: type) -> tuple[str, ...]:
    """Return the names of the arguments that the encoder's forward takes by position."""
    return tuple(one.name for one in _parameters(encoder).values() if one.kind is one.POSITIONAL_OR_KEYWORD)


def _are_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in _IDS and value.numel() > 0


def _asked(config: Any, call: Mapping[str, Any], name: str) -> bool:
    """Return whether the call, or else the configuration, asks for an output."""
    asked = call[name] if name in call else getattr(config, name, False)
    return asked is not False and asked is not None


def _is_understood(encoder: Any, name: str, value: Any, ids: Tensor, *, causal: bool) -> bool:
    """Return whether the packed pass can honour an argument."""
    if name in ("input_ids", "attention_mask"):
        return True
    if name in sequences.COLUMNS:
        return _takes_more(type(encoder)) and isinstance(value, (Tensor, int))
    if name in _COLUMNS:
        return _are_ids(value) and value.shape[0] in (1, ids.shape[0]) and value.shape[1] == ids.shape[1]
    if name == "is_causal":
        return bool(value) == causal
    if value is not False and name not in _parameters(type(encoder)) and name not in NO_EFFECT:
        return False  # a column of the batch, say: transformers ignores it, and a packed attention would refuse it
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, Tensor) and value.dim() == 0)


_SPAN_LABELS = ("start_positions", "end_positions")
_IGNORED = -100


@dataclass(frozen=True)
class _Call:
    """A running call of a model, and what its targets say about the states of padding."""

    model: ref[nn.Module]
    targets_in_padding: bool
    runs: bool
    """Whether the model's forward runs, and not a loss of the user's, which may call its parts."""
    loss_alone: bool = False
    """Whether nobody reads more of the results than a loss that leaves out padding."""
    leaves_padding_out: bool = False
    """Whether the call has a label for each token, and none at padding."""
    is_on_stack: bool = False
    """Whether Python's stack shows the call; that of a compiler does not."""

    def still_runs(self) -> bool:
        """Return whether the call has not ended: torch runs no hook after a KeyboardInterrupt."""
        model = self.model()
        return model is not None and (not self.is_on_stack or _is_on_stack(model))


_RUNNING: ContextVar[tuple[_Call, ...]] = ContextVar("whet_running_calls", default=())
"""The calls of optimised models that have begun in this thread, the innermost last; `_running` says which still run."""
_CALL = nn.Module._call_impl.__code__


def _running(model: nn.Module) -> list[_Call]:
    """Return the calls of the model that run."""
    return [call for call in _RUNNING.get() if call.model() is model and call.still_runs()]


def _is_on_stack(model: nn.Module) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def note_calls(model: nn.Module) -> list[RemovableHandle]:
    """Look at each call of the model: it may read first tokens alone, or have targets at padding tokens.

    Calls of its encoder from elsewhere are not seen. Return the handles that end it. They belong to what is pickled of
    the model: torch numbers hooks by process, and loading a handle has it leave the handle's number out.
    """
    if model is model.base_model:
        return []
    return [
        model.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True),  # pyright: ignore[reportArgumentType]
        model.register_forward_hook(_end, always_call=True),  # pyright: ignore[reportArgumentType]
    ]


def padding_needed(model: nn.Module, asked: PaddingInLoss) -> PaddingInLoss:
    """Return what the running call needs: each padding token's own state if it has targets there, else what was asked.

    Nothing if only first tokens are read, and no hook looks at the encoder's output.
    """
    calls = _running(model)
    if any(call.targets_in_padding for call in calls):
        return "all"
    if predicts_next_tokens(model):
        return _of_next_tokens(asked)
    encoder: Any = model.base_model
    seen = encoder._forward_hooks or nn.modules.module._global_forward_hooks
    if not calls or seen or other_forward(model) is not None:
        return asked
    if asked == "sampled" and any(call.loss_alone for call in calls):
        return "none"
    return "none" if _reads_first_tokens(model) else asked


def padding_usually_needed(model: nn.Module, asked: PaddingInLoss) -> PaddingInLoss:
    """Return what calls of the model need whose labels are not at padding, if no hook looks at the encoder's output."""
    if predicts_next_tokens(model):
        return _of_next_tokens(asked)
    return "none" if _reads_first_tokens(model) else asked


def _of_next_tokens(asked: PaddingInLoss) -> PaddingInLoss:
    """Return what a language model needs: its loss and `generate` leave padding out, and its logits there are zeros'.

    "all" is for who reads these all the same; such calls run with their padding.
    """
    return "all" if asked == "all" else "none"


def read_first_tokens_alone(model: nn.Module) -> bool:
    """Return whether the model's forward runs, and reads no hidden state but that of each row's first token."""
    runs = any(call.runs for call in _running(model))
    return runs and heads.reads_beside(model) == "first tokens"


def labels_leave_padding_out(model: nn.Module) -> bool:
    """Return whether the running call of the model has a label for each token, and none at padding."""
    return any(call.leaves_padding_out for call in _running(model))


def shows_tokens(model: nn.Module) -> bool:
    """Return whether the model's results have a place for each token, which a loss elsewhere may read at padding."""
    return predicts_next_tokens(model) or heads.reads_beside(model) == "tokens"


def padding_needed_by(model: nn.Module, asked: PaddingInLoss, inputs: Mapping[str, Any]) -> PaddingInLoss:
    """Return what a call of the model with these inputs will need."""
    with targets_of(model, inputs):
        return padding_needed(model, asked)


@contextmanager
def targets_of(model: nn.Module, inputs: Mapping[str, Any], *, loss_alone: bool = False) -> Iterator[None]:
    """Note a batch's targets while a loss of a user's own runs: it may keep them from the model.

    `loss_alone`: of the model's results nobody reads anything but its own loss. Padding is then not computed where the
    labels, one for each token, leave it out.
    """
    alone = loss_alone and _has_labels_of_tokens(model, inputs)
    token = _RUNNING.set((*_RUNNING.get(), _Call(ref(model), targets_in_padding(inputs), runs=False, loss_alone=alone)))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def targets_in_padding(call: Mapping[str, Any]) -> bool:
    """Return whether a call's labels, or its start or end positions, are at padding tokens."""
    mask = call.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    labels = [value for name, value in call.items() if name.endswith("labels") and isinstance(value, Tensor)]
    labels = [on_host(one) for one in labels if one.shape == mask.shape]
    places = [on_host(call[name]).reshape(-1) for name in _SPAN_LABELS if isinstance(call.get(name), Tensor)]
    places = [place for place in places if place.numel() == len(mask)]
    if not labels and not places:
        return False
    padding = on_host(mask) == 0
    return any(bool(((one != _IGNORED) & padding).any()) for one in labels) or any(
        _is_at(place, padding) for place in places
    )


def _gives_labels_of_tokens(call: Mapping[str, Any]) -> bool:
    """Return whether a call has a label for each token."""
    labels, mask = call.get("labels"), call.get("attention_mask")
    return isinstance(labels, Tensor) and isinstance(mask, Tensor) and labels.shape == mask.shape


def _has_labels_of_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the model is a head of transformers whose loss leaves out the tokens without a label."""
    if not _gives_labels_of_tokens(inputs):
        return False
    if any(hook not in (_begin, _end) for hook in model._forward_hooks.values()):
        return False
    return heads.reads_beside(model) == "tokens"


def _is_at(place: Tensor, padding: Tensor) -> bool:
    """Return whether a place (B,) is at padding; one behind the last column is no target, as heads have it."""
    inside = place < padding.shape[1]
    column = place.clamp(0, padding.shape[1] - 1)
    return bool((padding.gather(1, column[:, None].long())[:, 0] & inside).any())


def _reads_first_tokens(model: nn.Module) -> bool:
    packed = packed_model(model)
    if packed is not None and packed.family.proven:
        return False  # a head of an unknown family may average its tokens, whatever its name
    return heads.reads_beside(model) == "first tokens"


@outside("it keeps what runs now")
def _begin(model: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    call = named(model, given, options) or options
    followed = is_followed()
    in_padding = not followed and targets_in_padding(call)
    begun = _Call(
        ref(model),
        in_padding,
        runs=True,
        leaves_padding_out=not followed and not in_padding and _gives_labels_of_tokens(call),
        is_on_stack=_is_on_stack(model),
    )
    _RUNNING.set((*(one for one in _RUNNING.get() if one.still_runs()), begun))
    if not followed:
        _require_fitting_labels(model, call)


def _require_fitting_labels(model: nn.Module, call: Mapping[str, Any]) -> None:
    """Raise DataError for labels that the model's loss cannot take: after the loss, only torch's own error is left."""
    ids = call.get("input_ids")
    if not type(model).__module__.startswith("transformers."):
        return  # labels of a class of a user's own may mean anything
    if isinstance(ids, Tensor) and (found := bad_batch.odd_labels(model, ids, call)) is not None:
        raise found


@outside("it keeps what runs now")
def _end(model: nn.Module, *_: Any) -> None:
    calls = _RUNNING.get()
    own = [number for number, call in enumerate(calls) if call.runs and call.model() is model]
    _RUNNING.set(calls[: own[-1]] if own else calls)
