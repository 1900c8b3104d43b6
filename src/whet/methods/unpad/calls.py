"""Which calls of an encoder can run without their padding, by what they give and what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from whet.data import sequences
from whet.kernels.operator import is_followed
from whet.models import attention
from whet.models.called_with import NO_EFFECT

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
    odd = [name for name, value in call.items() if not _is_understood(encoder, name, value, ids, causal=causal)]
    if odd:
        return f"calls with {', '.join(odd)}"
    if (named := sequences.names_sequences(call)) and mask is not None and not bool(mask.all()):
        return f"calls with {', '.join(named)} and padding in attention_mask: give one of the two"
    if bool(call.get("is_causal", getattr(config, "is_causal", causal))) != causal:
        return f"calls with a {'bidirectional' if causal else 'causal'} mask"
    return _why_cached(encoder, call) if causal else None


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
    if isinstance(mask, Tensor) and not (isinstance(ids, Tensor) and mask.shape == ids.shape and bool(mask.all())):
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
