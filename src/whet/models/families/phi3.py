"""Phi-3 and Phi-4: Llama's blocks with joined projections and dropouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.kernels.activation import gated_act_joined
from whet.models.families import llama
from whet.models.family import Family, FeedForward, Part, RmsNorm
from whet.models.fused import decoder
from whet.models.fused.dropout import PlacedDropout
from whet.models.fused.layers import pass_position, with_bias
from whet.models.standard import ACTIVATIONS, why_called


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the gated feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None or why_called(self.activation_fn) is not None:
        return type(self).forward(self, hidden_states)
    found = gated_act_joined(with_bias(hidden_states, self.gate_up_proj), ACTIVATIONS[type(self.activation_fn)])
    return with_bias(found, self.down_proj)


FAMILY = Family(
    model_types=("phi3",),
    package="transformers.models.phi3",
    attention=("Phi3Attention",),
    blocks=("Phi3DecoderLayer",),
    causal=True,
    parts={
        "Phi3Attention": Part(llama.attention, {"qkv_proj": nn.Linear, "o_proj": nn.Linear}),
        "Phi3MLP": Part(mlp, {"gate_up_proj": nn.Linear, "activation_fn": None, "down_proj": nn.Linear}),
        "Phi3DecoderLayer": Part(
            llama.block,
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
