"""Whether a packed pass does all that an attention is called for: it knows no masks, caps or sinks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from whet.errors import ConfigError

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


def require_understood(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    """Refuse what a packed pass would ignore: a mask or a bias that the module made itself, a cap, sinks."""
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
