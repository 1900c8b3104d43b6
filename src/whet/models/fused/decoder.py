"""Pieces of decoders in Llama's shape: rotated queries and keys of grouped heads, gated feed-forward parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from whet.kernels.activation import gated_act
from whet.kernels.attention_spec import window_of
from whet.kernels.packed_attention import attend
from whet.kernels.rotary import rotate
from whet.models.family import Slots
from whet.models.fused.attention import spec_of
from whet.models.fused.layers import normalised, with_bias
from whet.models.standard import ACTIVATIONS, why_called

PROJECTIONS: Slots = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), nn.Linear)
GATED: Slots = {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), nn.Linear), "act_fn": None}
_MOVING_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sequence of a batch."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines (1, N, K) of the angles by which queries and keys are rotated."""


def attended(attn: Any, x: Tensor, angles: Angles | None, window: int | None) -> Tensor:
    """Return the attention (1, N, H K) of x (1, N, D), before its output product; `angles` None: nothing is rotated.

    `window` is the number of keys that a query sees, itself included, as transformers counts them; None: all before it.
    """
    q, k, v = _projected(attn, x)
    q, k = (_norm_of_heads(attn, name, one) for name, one in (("q_norm", q), ("k_norm", k)))
    if angles is not None:
        q, k = (rotate(one, angles[0][0], angles[1][0]) for one in (q, k))
    p = attn.attention_dropout if attn.training else 0.0
    spec = spec_of(attn, x.shape[1], attn.scaling, p, window_of(window))
    return attend(q.to(v.dtype), k.to(v.dtype), v, spec).flatten(1)[None]


def _projected(attn: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return query (N, H, K), key and value (N, G, K) of three projections, or of the joined one of Phi-3."""
    if hasattr(attn, "qkv_proj"):
        heads, groups = attn.config.num_attention_heads, attn.num_key_value_heads
        joined = with_bias(x, attn.qkv_proj)[0].unflatten(-1, (-1, attn.head_dim))
        return joined.split([heads, groups, groups], dim=1)
    projected = (with_bias(x, getattr(attn, name))[0] for name in ("q_proj", "k_proj", "v_proj"))
    return tuple(one.unflatten(-1, (-1, attn.head_dim)) for one in projected)


def gated(mlp: Any, x: Tensor) -> Tensor:
    """Return down(act(gate(x)) * up(x)) (1, N, D)."""
    gate, up = with_bias(x, mlp.gate_proj), with_bias(x, mlp.up_proj)
    if why_called(mlp.act_fn) is not None:
        return with_bias(mlp.act_fn(gate) * up, mlp.down_proj)
    return with_bias(gated_act(gate, up, ACTIVATIONS[type(mlp.act_fn)]), mlp.down_proj)


def why_padded(model: Any) -> str | None:
    """Return why a model with rotary positions needs its padding; None: it does not."""
    return why_rotary_moves(model.config)


def why_rotary_moves(config: Any) -> str | None:
    """Return why angles of rotary embeddings with this configuration depend on other rows; None: they do not."""
    for name, value in named_settings(config.to_dict()):
        if name in ("rope_type", "type") and value in _MOVING_ROTARY:
            return f"its rotary embeddings ({value}) depend on the longest row of a batch"
    return None


def named_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all settings of a configuration by their own names, also those of dicts and lists inside of it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from named_settings(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
            yield str(name), max(value)
        else:
            yield str(name), value


def _norm_of_heads(attn: Any, name: str, x: Tensor) -> Tensor:
    """Return x (N, H, K) normalised head by head, if the module has such a norm."""
    norm: nn.Module | None = getattr(attn, name, None)
    return x if norm is None else normalised(x, norm)
