"""What a packed pass refuses: masks, caps and sinks that it does not know, and parts of a model that run outside of it.

A checkpoint may compute a part again after its pass, or a part may be another model's. Only the pass knows where rows
begin and which dropout masks it drew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from whet.errors import ConfigError
from whet.kernels.batch_position import Site, running_position


def require_pass(module: nn.Module, site: Site, x: Tensor) -> None:
    """Raise ConfigError if a backward pass computes the module again and x (B, ...) may be packed, which has B = 1."""
    if x.shape[0] == 1 and x.dim() > 2 and site.placement.is_lost:
        raise ConfigError(
            what="a checkpoint around a part of the model cannot compute it again: the forward pass is over",
            got=f"{type(module).__name__} called in backward, input of shape {tuple(x.shape)}",
            why="without the pass, rows that lie end to end would see each other, and dropout would draw other masks",
            fix="use model.activation_checkpointing_enable(), or gradient_checkpointing=True in whet's Trainer; under "
            "whet.optimize a checkpoint around the call of the complete model works too",
        )


def require_no_other_pass(module: nn.Module, n_rows: int, n_tokens: int) -> None:
    """Raise ConfigError if a module without a pass is given the packed states of another model's pass."""
    position = None if torch.compiler.is_compiling() else running_position()
    if position is not None and position.is_of(n_rows, n_tokens):
        raise came_later(module)


class CameLaterError(ConfigError):
    """A part of the model that the running pass knows nothing of."""


def came_later(module: nn.Module) -> CameLaterError:
    """Return the error for a part that the running pass knows nothing of."""
    return CameLaterError(
        what="a part came into the model after whet had prepared it",
        got=type(module).__name__,
        why="in a batch without padding it would see the tokens of all rows",
        fix="change the model first, then call whet.optimize or make the Trainer; a part of another model that whet "
        "prepared has to be taken from it before, or after whet.restore",
    )


NO_EFFECT = frozenset(TransformersKwargs.__annotations__) - {"is_causal"} | {
    *("dropout", "scaling", "sliding_window"),  # read by the pass
    *("deterministic", "cache_position", "use_cache", "return_dict"),
    "token_type_ids",  # for a model without token types, whose modules hand it on; the AttentionInterface ignores it
}
"""Options of an attention call that a packed pass reads, or that change nothing in it."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument with the keys and values of earlier calls: since transformers 5.24, and before."""


def has_cache(options: Mapping[str, Any]) -> bool:
    """Return whether a call of a decoder's part has keys and values of earlier calls, or a place to keep its own."""
    return any(options.get(name) is not None for name in CACHE_NAMES)


def cap_of(attention: nn.Module) -> float | None:
    """Return what an attention module caps its scores with, as Gemma 2's may; None: they have no cap."""
    return getattr(attention, "attn_logit_softcapping", None)


def require_understood(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    """Refuse what a packed pass would ignore: a mask or a bias that the module made itself, a cap, sinks."""
    options = {"softcap": cap_of(module), **options}
    usual = {"is_causal": getattr(module, "is_causal", False)}  # transformers hands on what the configuration says
    asked = [
        name
        for name, value in options.items()
        if name not in NO_EFFECT and value is not None and value is not usual.get(name, False)
    ]
    if mask is not None:
        asked.append("attention_mask")
    names = " and ".join(asked)
    if asked:
        raise ConfigError(
            what=f"{type(module).__name__} computes attention with {names}, which packed rows do not have",
            got=f"a packed batch whose attention is called with {names}",
            why="without padding there is no (T, T) tensor for it, and the result would be another model's",
            fix="use --attn_implementation sdpa or eager, which runs padded with the module's own arithmetic; after "
            "whet.optimize, call whet.restore",
        )
