"""DeBERTa v1: v2's attention without buckets, one projection for query, key and value, and a norm class of its own."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

from whet.kernels.attention_spec import Relative
from whet.kernels.linear import linear
from whet.kernels.packed_attention import attend
from whet.models.families import bert
from whet.models.families.deberta_v2 import TERMS, deberta_embeddings, encoder
from whet.models.family import Family, Part, Slots
from whet.models.fused.attention import spec_of
from whet.models.fused.chosen import of_chosen
from whet.models.fused.dropout import PlacedDropout
from whet.models.fused.embeddings import TABLE_SLOTS
from whet.models.fused.layers import pass_position, with_bias
from whet.models.fused.padding_states import mean_of_row
from whet.models.standard import why_called


def self_attention(self: Any, hidden_states: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the attention output (B, T, D), or (1, M, D) of the tokens that the last block computes."""
    position = pass_position(self, hidden_states)
    if position is None:
        return type(self).forward(self, hidden_states, *given, **options)
    scale = (self.attention_head_size * (1 + len(self.pos_att_type))) ** -0.5
    spec = spec_of(self, hidden_states.shape[1], scale, self.dropout.p)
    q, k, v = _projected(self, hidden_states)
    found = attend(q, k, v, spec, _relative(self, options.get("relative_pos"), options.get("rel_embeddings")))
    return of_chosen(mean_of_row(found, v, position).flatten(1)[None], self, position), None


def _projected(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value (N, H, K) of x (1, N, D); the projection gives them head by head."""
    shape = (self.num_attention_heads, 3, -1)
    of_heads = [bias.unflatten(0, (shape[0], -1)) for bias in (self.q_bias, torch.zeros_like(self.q_bias), self.v_bias)]
    bias = torch.stack(of_heads, dim=1).flatten()
    if why_called(self.in_proj, nn.Linear) is None:
        found = linear(x, self.in_proj.weight, bias)
    else:
        found = self.in_proj(x)
        found = found + bias.to(found.dtype)
    return found[0].unflatten(-1, shape).unbind(2)


def _relative(self: Any, places: Tensor | None, vectors: Tensor | None) -> Relative | None:
    """Return what the scores get by distance."""
    if places is None or vectors is None or not any(term in self.pos_att_type for term in TERMS):
        return None
    layers = [getattr(self, name, None) for name in ("pos_proj", "pos_q_proj")]  # of the terms that there are
    found = [
        None if one is None else with_bias(vectors, one).unflatten(-1, (self.num_attention_heads, -1)) for one in layers
    ]
    return Relative(found[0], found[1], places)


def why_padded(model: nn.Module) -> str | None:
    """Return why a model of this family needs its padding."""
    mixed = any(getattr(module, "talking_head", False) for module in model.modules())
    return "its attention mixes the scores of all heads (talking_head)" if mixed else None


_ATTENTION: Slots = dict.fromkeys(("in_proj", "pos_proj", "pos_q_proj"), nn.Linear)
_OUTPUT: Slots = {"dense": nn.Linear, "LayerNorm": DebertaLayerNorm, "dropout": PlacedDropout}

FAMILY = Family(
    model_types=("deberta",),
    package="transformers.models.deberta",
    attention=("DisentangledSelfAttention",),
    blocks=("DebertaLayer",),
    stack="encoder.layer",
    parts={
        "DebertaEmbeddings": Part(deberta_embeddings, {**TABLE_SLOTS, "LayerNorm": DebertaLayerNorm}, always=True),
        "DebertaEncoder": Part(encoder, {}, always=True),
        "DisentangledSelfAttention": Part(self_attention, _ATTENTION, always=True),
        "DebertaSelfOutput": Part(bert.attention_output, _OUTPUT),
        "DebertaIntermediate": Part(bert.intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
        "DebertaOutput": Part(bert.attention_output, _OUTPUT),
    },
    feed_forward=bert.FEED_FORWARD,
    adds_masks=True,
    why_padded=why_padded,
    tiny={
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
)
