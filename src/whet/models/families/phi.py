"""Phi-1 to Phi-2: attention and feed-forward read one norm, and a part of each head is rotated."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.models.families import llama
from whet.models.family import Family, FeedForward, Part
from whet.models.fused import decoder
from whet.models.fused.layers import inner, pass_position, with_bias


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the feed-forward part (B, T, D)."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states)
    return with_bias(inner(hidden_states, self.fc1, self.activation_fn), self.fc2)


FAMILY = Family(
    model_types=("phi",),
    package="transformers.models.phi",
    attention=("PhiAttention",),
    blocks=("PhiDecoderLayer",),
    causal=True,
    parts={"PhiMLP": Part(mlp, {"fc1": nn.Linear, "activation_fn": None, "fc2": nn.Linear})},
    feed_forward=FeedForward(path="mlp", up=("mlp.fc1",), down="mlp.fc2", activation="mlp.activation_fn"),
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "partial_rotary_factor": 0.5},
)
