"""Phi-3 and Phi-4: Llama's blocks with joined projections and dropouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.kernels.layers.activation import gated_act_joined
from whet.models.called_with import require_understood
from whet.models.families import llama
from whet.models.family import Family, FeedForward, Part, RmsNorm
from whet.models.fused import decoder
from whet.models.fused.dropout import PlacedDropout
from whet.models.fused.layers import is_plain, normalised, pass_position, product, residual_and_norm, with_bias
from whet.models.standard import ACTIVATIONS, why_called


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention through its output product (B, T, D)."""
    if not llama.in_training_pass(self, hidden_states, position_embeddings, past_key_values):
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **options
        )
    require_understood(self, attention_mask, options)
    return with_bias(_attended(self, hidden_states, position_embeddings), self.o_proj), None


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the gated feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None or why_called(self.activation_fn) is not None:
        return type(self).forward(self, hidden_states)
    found = gated_act_joined(with_bias(hidden_states, self.gate_up_proj), ACTIVATIONS[type(self.activation_fn)])
    return with_bias(found, self.down_proj)


def block(
    self: Any,
    hidden_states: Tensor,
    *more: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Tensor:
    """Return the block's result (B, T, D): its input plus attention plus feed-forward."""
    given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, **options}
    if more or not llama.in_training_pass(self, hidden_states, position_embeddings, options.get("past_key_values")):
        return type(self).forward(self, hidden_states, *more, **given)
    x, attn = normalised(hidden_states, self.input_layernorm), self.self_attn
    if is_plain(attn):
        require_understood(attn, attention_mask, options)
        found = product(_attended(attn, x, position_embeddings), attn.o_proj)
    else:
        found = attn(hidden_states=x, **given)[0], None
    x, total = residual_and_norm(found, hidden_states, self.post_attention_layernorm, self.resid_attn_dropout)
    return total + self.resid_mlp_dropout(self.mlp(x))


def _attended(attn: Any, x: Tensor, angles: decoder.Angles) -> Tensor:
    heads, groups = attn.config.num_attention_heads, attn.num_key_value_heads
    q, k, v = with_bias(x, attn.qkv_proj)[0].unflatten(-1, (-1, attn.head_dim)).split([heads, groups, groups], dim=1)
    return decoder.attended_heads(attn, (q, k, v), angles, getattr(attn.config, "sliding_window", None))


FAMILY = Family(
    model_types=("phi3",),
    package="transformers.models.phi3",
    attention=("Phi3Attention",),
    blocks=("Phi3DecoderLayer",),
    causal=True,
    parts={
        "Phi3Attention": Part(attention, {"qkv_proj": nn.Linear, "o_proj": nn.Linear}),
        "Phi3MLP": Part(mlp, {"gate_up_proj": nn.Linear, "activation_fn": None, "down_proj": nn.Linear}),
        "Phi3DecoderLayer": Part(
            block,
            {
                "self_attn.o_proj": nn.Linear,
                "input_layernorm": "Phi3RMSNorm",
                "post_attention_layernorm": "Phi3RMSNorm",
                "resid_attn_dropout": PlacedDropout,
            },
        ),
    },
    rms_norms={"Phi3RMSNorm": RmsNorm()},
    feed_forward=FeedForward(
        path="mlp", up=("mlp.gate_up_proj",), down="mlp.down_proj", activation="mlp.activation_fn", joined=True
    ),
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "sliding_window": 8},
)
