"""DeBERTa v1 to v3, mDeBERTa: scores depend on the distance of two tokens through vectors (He et al. 2021).

Their attention does not call transformers' AttentionInterface, and their encoder makes (T, T) tensors: both get other
forwards wherever the model runs packed. v2-xlarge's convolution mixes the tokens of rows: such a model stays padded.
v1 has no buckets, one projection for query, key and value, and a norm class of its own.

Both sides of a pair are masked: padding has embeddings of 0, and a padding token attends to all places of its row
alike, to padding too. So all padding tokens of a row have the same state, and one that is computed represents any
number of others exactly.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from whet.kernels.attention_spec import Relative
from whet.kernels.batch_position import BatchPosition, Drop
from whet.kernels.dropout import dropout
from whet.kernels.linear import linear
from whet.kernels.operator import kept_table
from whet.kernels.packed_attention import attend
from whet.models.families import bert
from whet.models.family import Family, Part, Slots
from whet.models.fused.attention import attended, of_chosen, projected, rate_of_called, spec_of
from whet.models.fused.layers import (
    TABLE_SLOTS,
    PlacedDropout,
    embeddings,
    normalised,
    pass_position,
    require_prepared,
    with_bias,
)
from whet.models.fused.limits import require_understood
from whet.models.standard import why_called

_TERMS = ("c2p", "p2c")
"""Names in `pos_att_type`: queries times vectors of distances, and keys times others."""


def deberta_embeddings(
    self: Any,
    input_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """Return the embeddings (B, T, D), which are 0 for padding tokens."""
    position = None if input_ids is None else pass_position(self, input_ids)
    found = None
    if position is not None and input_ids is not None and inputs_embeds is None and self.embed_proj is None:
        found = embeddings(self, input_ids, position_ids, token_type_ids)
    if found is None:
        found = type(self).forward(self, input_ids, token_type_ids, position_ids, mask, inputs_embeds)
    return found if position is None else _without_padding(found, position)


def encoder(self: Any, hidden_states: Tensor, *given: Any, **options: Any) -> Any:
    """Return the hidden states of the last block, and of all if asked, as the class does; packed, without weights."""
    position = pass_position(self, hidden_states)
    if position is None:
        return type(self).forward(self, hidden_states, *given, **options)
    first, places, vectors = vectors_by_distance(self, position.longest - 1)
    states = [hidden_states]
    for block in self.layer:
        require_prepared(block.attention.self)
        dropped = None if vectors is None else _dropped(block.attention.self.pos_dropout, vectors, first, position)
        states.append(block(states[-1], None, relative_pos=places, rel_embeddings=dropped)[0])
    seen = tuple(states) if options.get("output_hidden_states", True) else None
    if not options.get("return_dict", True):
        return (states[-1],) if seen is None else (states[-1], seen)
    return BaseModelOutput(last_hidden_state=states[-1], hidden_states=seen)


def vectors_by_distance(encoder: Any, reach: int) -> tuple[int, Tensor | None, Tensor | None]:
    """Return the rows of the encoder's table that distances up to `reach` read (P, D), after its norm.

    Before them come the first row's number in the table, and their places among the rows by distance, as in `Relative`.
    """
    if not encoder.relative_attention:
        return 0, None, None
    table = encoder.rel_embeddings.weight
    buckets, most = getattr(encoder, "position_buckets", -1), encoder.max_relative_positions
    first, end, places = _places_on(buckets, most, reach, table.device)
    vectors = table[first:end]
    if "layer_norm" in getattr(encoder, "norm_rel_ebd", ()):
        vectors = normalised(vectors, encoder.LayerNorm)
    return first, places, vectors


@kept_table
def _places_on(n_buckets: int, most: int, reach: int, device: torch.device) -> tuple[int, int, Tensor]:
    """Return the first row and the end of `places_by_distance`, and these places, counted from the first row."""
    places = places_by_distance(n_buckets, most, reach)
    first = int(places.min())
    return first, int(places.max()) + 1, (places - first).to(device, torch.int32)


def places_by_distance(n_buckets: int, most: int, reach: int) -> Tensor:
    """Return the rows (2 reach + 1,) of the table of relative positions for the distances j - i from -reach on."""
    before = torch.arange(reach, -reach - 1, -1)  # i - j, as transformers counts
    span = n_buckets if n_buckets > 0 else most
    if n_buckets > 0:
        before = make_log_bucket_position(before, n_buckets, most).long()
    return (before + span).clamp(0, 2 * span - 1)


def self_attention(self: Any, hidden_states: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the attention output (B, T, D), or (1, M, D) of the tokens that the last block computes."""
    position = pass_position(self, hidden_states)
    if position is None:
        return type(self).forward(self, hidden_states, *given, **options)
    require_understood(self, given[0] if given else options.get("attention_mask"), {})
    places, vectors = options.get("relative_pos"), options.get("rel_embeddings")
    n_terms = 1 + sum(term in self.pos_att_type for term in _TERMS)
    scale = (self.attention_head_size * n_terms) ** -0.5
    spec = spec_of(self, hidden_states.shape[1], scale, rate_of_called(self.dropout))
    parts = (self.query_proj, self.key_proj, self.value_proj)
    tensors = projected(hidden_states, parts, self.num_attention_heads)
    found = attended(tensors, spec, _relative(self, places, vectors))
    values = tensors[0][:, 2] if len(tensors) == 1 else tensors[2]
    return of_chosen(_mean_of_row(found, values, position).flatten(1)[None], self, position), None


def _relative(self: Any, places: Tensor | None, vectors: Tensor | None) -> Relative | None:
    """Return what the scores get by distance."""
    if places is None or vectors is None or not any(term in self.pos_att_type for term in _TERMS):
        return None
    shared = self.share_att_key

    def through(term: str, layer: str) -> Tensor | None:
        if term not in self.pos_att_type:
            return None
        return with_bias(vectors, getattr(self, layer)).unflatten(-1, (self.num_attention_heads, -1))

    keys = through("c2p", "key_proj" if shared else "pos_key_proj")
    return Relative(keys, through("p2c", "query_proj" if shared else "pos_query_proj"), places)


def _dropped(module: Any, vectors: Tensor, first: int, position: BatchPosition) -> Tensor:
    """Return the vectors with channels dropped. Each layer has a mask of its own, the same for all rows of a step."""
    if why_called(module, PlacedDropout) is not None:
        return module(vectors)
    if not module.training or module.p == 0.0:
        return vectors
    drop = Drop.at(module.site, module.p, position.of_table(first, len(vectors)))
    return vectors if drop is None else dropout(vectors, drop)


def self_attention_v1(self: Any, hidden_states: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the attention output (B, T, D), or (1, M, D) of the tokens that the last block computes."""
    position = pass_position(self, hidden_states)
    if position is None:
        return type(self).forward(self, hidden_states, *given, **options)
    scale = (self.attention_head_size * (1 + len(self.pos_att_type))) ** -0.5
    spec = spec_of(self, hidden_states.shape[1], scale, rate_of_called(self.dropout))
    q, k, v = _projected_v1(self, hidden_states)
    found = attend(q, k, v, spec, _relative_v1(self, options.get("relative_pos"), options.get("rel_embeddings")))
    return of_chosen(_mean_of_row(found, v, position).flatten(1)[None], self, position), None


def _projected_v1(self: Any, x: Tensor) -> tuple[Tensor, ...]:
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


def _relative_v1(self: Any, places: Tensor | None, vectors: Tensor | None) -> Relative | None:
    """Return what the scores get by distance."""
    if places is None or vectors is None or not any(term in self.pos_att_type for term in _TERMS):
        return None
    layers = [getattr(self, name, None) for name in ("pos_proj", "pos_q_proj")]  # of the terms that there are
    found = [
        None if one is None else with_bias(vectors, one).unflatten(-1, (self.num_attention_heads, -1)) for one in layers
    ]
    return Relative(found[0], found[1], places)


def why_v1_padded(model: nn.Module) -> str | None:
    """Return why a model of this family needs its padding."""
    mixed = any(getattr(module, "talking_head", False) for module in model.modules())
    return "its attention mixes the scores of all heads (talking_head)" if mixed else None


def _without_padding(x: Tensor, position: BatchPosition) -> Tensor:
    """Return x (1, N, D) with zeros for padding tokens."""
    return x if position.sizes is None else x.masked_fill(_is_padding(position)[0][None, :, None], 0.0)


def _mean_of_row(found: Tensor, values: Tensor, position: BatchPosition) -> Tensor:
    """Return the attention (N, H, K), that of padding tokens replaced by the mean of the values (N, H, K) of their row.

    It has no dropout: a weight is one of as many as the padded row has places.
    """
    if position.sizes is None:
        return found
    is_padding, row = _is_padding(position)
    counted = values.float() * position.sizes[:, None, None]
    n_rows = len(position.cu_seqlens) - 1
    sums = counted.new_zeros(n_rows, *values.shape[1:]).index_add(0, row, counted)
    n = position.sizes.new_zeros(n_rows).index_add(0, row, position.sizes)
    means = (sums / n.clamp(min=1.0)[:, None, None]).index_select(0, row)  # 0 for what fills the batch up
    return torch.where(is_padding[:, None, None], means.to(found.dtype), found)


def _is_padding(position: BatchPosition) -> tuple[Tensor, Tensor]:
    """Return which tokens (N,) are padding, and the row (N,) of each."""
    assert position.key_counts is not None
    row = (position.slots - position.slots[0]).long()
    starts, counts = (x.to(row.device).index_select(0, row) for x in (position.cu_seqlens, position.key_counts))
    return torch.arange(len(row), device=row.device) - starts >= counts, row


_ATTENTION: Slots = dict.fromkeys(("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"), nn.Linear)
_ATTENTION_V1: Slots = dict.fromkeys(("in_proj", "pos_proj", "pos_q_proj"), nn.Linear)
_OUTPUT_V1: Slots = {"dense": nn.Linear, "LayerNorm": DebertaLayerNorm, "dropout": PlacedDropout}

PACKAGES = ("transformers.models.deberta_v2", "transformers.models.deberta")
FAMILIES = (
    Family(
        model_types=("deberta-v2",),
        package=PACKAGES[0],
        attention=("DisentangledSelfAttention",),
        blocks=("DebertaV2Layer",),
        stack="encoder.layer",
        parts={
            "DebertaV2Embeddings": Part(deberta_embeddings, TABLE_SLOTS, always=True),
            "DebertaV2Encoder": Part(encoder, {}, always=True),
            "DisentangledSelfAttention": Part(self_attention, _ATTENTION, always=True),
            "DebertaV2SelfOutput": Part(bert.attention_output, bert.OUTPUT),
            "DebertaV2Intermediate": Part(bert.intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
            "DebertaV2Output": Part(bert.attention_output, bert.OUTPUT),
        },
        feed_forward=bert.FEED_FORWARD,
        adds_masks=True,
        read_by_blocks=("encoder.LayerNorm",),
        tiny={
            "relative_attention": True,
            "position_buckets": 16,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    Family(
        model_types=("deberta",),
        package=PACKAGES[1],
        attention=("DisentangledSelfAttention",),
        blocks=("DebertaLayer",),
        stack="encoder.layer",
        parts={
            "DebertaEmbeddings": Part(deberta_embeddings, {**TABLE_SLOTS, "LayerNorm": DebertaLayerNorm}, always=True),
            "DebertaEncoder": Part(encoder, {}, always=True),
            "DisentangledSelfAttention": Part(self_attention_v1, _ATTENTION_V1, always=True),
            "DebertaSelfOutput": Part(bert.attention_output, _OUTPUT_V1),
            "DebertaIntermediate": Part(bert.intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
            "DebertaOutput": Part(bert.attention_output, _OUTPUT_V1),
        },
        feed_forward=bert.FEED_FORWARD,
        adds_masks=True,
        why_padded=why_v1_padded,
        tiny={
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
)
