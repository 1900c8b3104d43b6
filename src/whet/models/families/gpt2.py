"""GPT-2: norms before attention and feed-forward, learnt positions, weights of (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from whet.kernels.activation import bias_act
from whet.kernels.linear import linear
from whet.kernels.packed_attention import attend_joined
from whet.models.family import Family, FeedForward, Part
from whet.models.fused.attention import rate, spec_of
from whet.models.fused.layers import (
    PlacedDropout,
    Product,
    is_plain,
    normalised,
    pass_position,
    residual_and_norm,
    result_of,
)
from whet.models.fused.limits import has_cache, require_understood
from whet.models.standard import ACTIVATIONS, why_called

_MASK = 1
"""Place of the mask among what follows the hidden states of a call."""


def attention(self: Any, hidden_states: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the attention through its output product and dropout (B, T, D)."""
    if not _in_training_pass(self, hidden_states, more, options):
        return type(self).forward(self, hidden_states, *more, **options)
    require_understood(self, *_mask_and_rest(more, options))
    return self.resid_dropout(_whole(_product(_attended(self, hidden_states), self.c_proj))), None


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None or why_called(self.act) is not None:
        return type(self).forward(self, hidden_states)
    found = bias_act(*_product(hidden_states, self.c_fc), ACTIVATIONS[type(self.act)])
    return self.dropout(_whole(_product(found, self.c_proj)))


def block(self: Any, hidden_states: Tensor, *more: Any, **options: Any) -> Tensor:
    """Return the block's result (B, T, D): its input plus attention plus feed-forward."""
    if not _in_training_pass(self, hidden_states, more, options):
        return type(self).forward(self, hidden_states, *more, **options)
    x, attn = normalised(hidden_states, self.ln_1), self.attn
    mask, rest = _mask_and_rest(more, options)
    if is_plain(attn):
        require_understood(attn, mask, rest)
        found, dropout = _product(_attended(attn, x), attn.c_proj), attn.resid_dropout
    else:
        found, dropout = (attn(x, attention_mask=mask, **rest)[0], None), nn.Identity()
    x, total = residual_and_norm(found, hidden_states, self.ln_2, dropout)
    return total + self.mlp(x)


def _in_training_pass(module: Any, x: Tensor, more: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return whether a call belongs to a packed pass: without keys of earlier calls or of an encoder.

    `more` begins with the keys and values of earlier calls and the mask; an encoder's hidden states follow.
    """
    if any(one is not None for place, one in enumerate(more) if place != _MASK):
        return False
    if has_cache(options) or options.get("encoder_hidden_states") is not None:
        return False
    return pass_position(module, x) is not None


def _mask_and_rest(more: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the mask of a call in a packed pass, and its other options."""
    mask = more[_MASK] if len(more) > _MASK else options.get("attention_mask")
    return mask, {name: value for name, value in options.items() if name != "attention_mask"}


def _attended(attn: Any, x: Tensor) -> Tensor:
    """Return the attention (1, N, D) of x (1, N, D), before its output product."""
    qkv = _whole(_product(x, attn.c_attn))[0].unflatten(-1, (3, attn.num_heads, attn.head_dim))
    spec = spec_of(attn, len(qkv), attn.scaling, rate(attn, attn.attn_dropout))
    return attend_joined(qkv, spec).flatten(1)[None]


def _product(x: Tensor, layer: Any) -> Product:
    """Return the product, and the bias that is still to be added; a layer that must be called adds its own."""
    if type(layer) is not Conv1D or why_called(layer, Conv1D) is not None:
        return result_of(x, layer), None
    return linear(x, layer.weight.t(), None, [layer.weight]), layer.bias


def _whole(found: Product) -> Tensor:
    product, bias = found
    return product if bias is None else product + bias.to(product.dtype)


def why_padded(model: Any) -> str | None:
    """Return why a model needs its padding: it may read an encoder."""
    return "it has cross-attention" if model.config.add_cross_attention else None


_BLOCK = {"attn.c_proj": Conv1D, "ln_1": nn.LayerNorm, "ln_2": nn.LayerNorm, "attn.resid_dropout": PlacedDropout}

PACKAGES = ("transformers.models.gpt2",)
FAMILIES = (
    Family(
        model_types=("gpt2",),
        package=PACKAGES[0],
        attention=("GPT2Attention",),
        blocks=("GPT2Block",),
        causal=True,
        parts={
            "GPT2Attention": Part(attention, {"c_attn": Conv1D, "c_proj": Conv1D}),
            "GPT2MLP": Part(mlp, {"c_fc": Conv1D, "act": None, "c_proj": Conv1D}),
            "GPT2Block": Part(block, _BLOCK),
        },
        feed_forward=FeedForward(
            path="mlp", up=("mlp.c_fc",), down="mlp.c_proj", activation="mlp.act", dropout="mlp.dropout"
        ),
        why_padded=why_padded,
        tiny={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_inner": 64},
    ),
)
