"""Phi: attention and feed-forward of Phi-1 to Phi-2 read one norm, and a part of each head is rotated.

Phi-3 and Phi-4 have Llama's blocks with joined projections and dropouts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.kernels.activation import gated_act_joined
from whet.models.families import llama
from whet.models.family import WINDOWS_IN_CONFIG, FeedForward, Part
from whet.models.fused.layers import PlacedDropout, inner, pass_position, with_bias
from whet.models.standard import ACTIVATIONS, why_called


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states)
    return with_bias(inner(hidden_states, self.fc1, self.activation_fn), self.fc2)


def gated_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the gated feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None or why_called(self.activation_fn) is not None:
        return type(self).forward(self, hidden_states)
    found = gated_act_joined(with_bias(hidden_states, self.gate_up_proj), ACTIVATIONS[type(self.activation_fn)])
    return with_bias(found, self.down_proj)


_PHI3_PARTS = {
    "Phi3Attention": Part(llama.attention, {"qkv_proj": nn.Linear, "o_proj": nn.Linear}),
    "Phi3MLP": Part(gated_mlp, {"gate_up_proj": nn.Linear, "activation_fn": None, "down_proj": nn.Linear}),
    "Phi3DecoderLayer": Part(
        llama.block,
        {
            "self_attn.o_proj": nn.Linear,
            "input_layernorm": "Phi3RMSNorm",
            "post_attention_layernorm": "Phi3RMSNorm",
            "resid_attn_dropout": PlacedDropout,
        },
    ),
}

PACKAGES = ("transformers.models.phi", "transformers.models.phi3")
FAMILIES = (
    llama.like_llama(
        "phi",
        "Phi",
        parts={"PhiMLP": Part(mlp, {"fc1": nn.Linear, "activation_fn": None, "fc2": nn.Linear})},
        feed_forward=FeedForward(path="mlp", up=("mlp.fc1",), down="mlp.fc2", activation="mlp.activation_fn"),
        rms_norms={},
        tiny={**llama.TINY, "partial_rotary_factor": 0.5},
    ),
    llama.like_llama(
        "phi3",
        "Phi3",
        parts=_PHI3_PARTS,
        feed_forward=FeedForward(
            path="mlp", up=("mlp.gate_up_proj",), down="mlp.down_proj", activation="mlp.activation_fn", joined=True
        ),
        windows=WINDOWS_IN_CONFIG,
        tiny={**llama.TINY, "sliding_window": 8},
    ),
)
