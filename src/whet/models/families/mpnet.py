"""MPNet: BERT's blocks with a bias by distance in all of them, and RoBERTa's positions.

Its attention does not call transformers' AttentionInterface, and its encoder makes a (T, T) bias: both get other
forwards wherever the model runs packed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from whet.models.families import bert
from whet.models.family import Family, Part, Slots
from whet.models.fused.attention import attention, rate_of_called
from whet.models.fused.layers import (
    TABLE_SLOTS,
    PlacedDropout,
    embeddings,
    finished,
    is_plain,
    pass_position,
    product,
    require_prepared,
    residual_norm,
    with_bias,
)
from whet.models.fused.limits import require_understood


def mpnet_embeddings(
    self: Any,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Return the embeddings (B, T, D)."""
    found = None
    if input_ids is not None and position_ids is not None and pass_position(self, input_ids) is not None:
        found = embeddings(self, input_ids, position_ids, None)
    return type(self).forward(self, input_ids, position_ids, inputs_embeds, **rest) if found is None else found


def encoder(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
    output_hidden_states: bool = False,
    return_dict: bool = False,
    **options: Any,
) -> Any:
    """Return the hidden states of the last block, and of all if asked, as the class does; packed, without weights."""
    position = pass_position(self, hidden_states)
    if position is None:
        given = (hidden_states, attention_mask, output_attentions, output_hidden_states, return_dict)
        return type(self).forward(self, *given, **options)
    bias = bias_by_distance(self, position.longest - 1)
    states = [hidden_states]
    for block in self.layer:
        require_prepared(block.attention.attn)
        states.append(block(states[-1], attention_mask, bias, output_attentions=False, **options)[0])
    seen = tuple(states) if output_hidden_states else None
    if not return_dict:
        return (states[-1],) if seen is None else (states[-1], seen)
    return BaseModelOutput(last_hidden_state=states[-1], hidden_states=seen)


def bias_by_distance(encoder: Any, reach: int) -> Tensor:
    """Return the bias (H, 2 reach + 1) of the distances j - i from -reach to reach."""
    table = encoder.relative_attention_bias
    distances = torch.arange(-reach, reach + 1, device=table.weight.device)
    return table(encoder.relative_position_bucket(distances)).t().contiguous()


def self_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Any = None, **options: Any
) -> tuple[Tensor, ...]:
    """Return the attention through its output product (B, T, D)."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, attention_mask, position_bias, **options)
    require_understood(self, attention_mask, options)
    return (with_bias(_attended(self, hidden_states, position_bias), self.o),)


def attention_block(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Any = None, **options: Any
) -> tuple[Tensor, ...]:
    """Return the first norm of a block."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, attention_mask, position_bias, **options)
    require_understood(self.attn, attention_mask, options)
    if is_plain(self.attn):
        found = product(_attended(self.attn, hidden_states, position_bias), self.attn.o)
    else:
        found = self.attn(hidden_states, attention_mask, position_bias, **options)[0], None
    return (finished(residual_norm(found, hidden_states, self.LayerNorm, self.dropout)),)


def block_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Return the second norm of a block, whose result is a tuple: a checkpoint cannot leave it out."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, input_tensor)
    found = product(hidden_states, self.dense)
    return finished(residual_norm(found, input_tensor, self.LayerNorm, self.dropout))


def first_position(_: nn.Module) -> int:
    """Return 2: the embeddings count from the padding token's number, which is 1 whatever the configuration says."""
    return 2


def _attended(attn: Any, x: Tensor, bias: Tensor) -> Tensor:
    parts = (attn.q, attn.k, attn.v)
    return attention(attn, x, parts, attn.num_attention_heads, rate_of_called(attn.dropout), bias)


_OWN: Slots = {"q": nn.Linear, "k": nn.Linear, "v": nn.Linear, "o": nn.Linear}

PACKAGES = ("transformers.models.mpnet",)
FAMILIES = (
    Family(
        model_types=("mpnet",),
        package=PACKAGES[0],
        attention=("MPNetSelfAttention",),
        blocks=("MPNetLayer",),
        stack="encoder.layer",
        parts={
            "MPNetEmbeddings": Part(mpnet_embeddings, TABLE_SLOTS),
            "MPNetEncoder": Part(encoder, {}, always=True),
            "MPNetSelfAttention": Part(self_attention, _OWN, always=True),
            "MPNetAttention": Part(attention_block, {"LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}),
            "MPNetIntermediate": Part(bert.intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
            "MPNetOutput": Part(block_output, bert.OUTPUT),
        },
        feed_forward=bert.FEED_FORWARD,
        first_position=first_position,
        skips_padding=True,
        adds_masks=True,
        tiny={"max_position_embeddings": 90},
    ),
)
