"""ALBERT: one block that runs many times, and narrow embeddings."""

from typing import Any

from torch import Tensor, nn

from whet.models.families.bert import PROJECTIONS, bert_embeddings
from whet.models.family import Family, Part, Slots
from whet.models.fused.attention import attention, rate
from whet.models.fused.layers import (
    TABLE_SLOTS,
    PlacedDropout,
    block_end,
    finished,
    inner,
    pass_position,
    product,
    residual_norm,
)
from whet.models.fused.limits import require_understood


def albert_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *rest: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the first norm of a block: the class holds the output product, the residual and the norm as well."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, attention_mask, *rest, **options)
    require_understood(self, attention_mask, options)
    parts = (self.query, self.key, self.value)
    seen = attention(self, hidden_states, parts, self.num_attention_heads, rate(self, self.attention_dropout))
    found = product(seen, self.dense)
    return finished(residual_norm(found, hidden_states, self.LayerNorm, self.output_dropout)), None


def layer(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return the block's result (B, T, D); its feed-forward part has no dropout."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    seen, _ = self.attention(hidden_states, *rest, **options)
    found = product(inner(seen, self.ffn, self.activation), self.ffn_output)
    return block_end(self, residual_norm(found, seen, self.full_layer_layer_norm, None))


def pooled(encoder: Any, hidden: Tensor) -> Tensor:
    """Return the first tokens through the pooler, which is a plain linear layer here."""
    return encoder.pooler_activation(encoder.pooler(hidden[:, 0]))


_ATTENTION: Slots = {
    **PROJECTIONS,
    "dense": nn.Linear,
    "LayerNorm": nn.LayerNorm,
    "output_dropout": PlacedDropout,
}
_LAYER: Slots = {
    "ffn": nn.Linear,
    "activation": None,
    "ffn_output": nn.Linear,
    "full_layer_layer_norm": nn.LayerNorm,
}

PACKAGES = ("transformers.models.albert",)
FAMILIES = (
    Family(
        model_types=("albert",),
        package=PACKAGES[0],
        attention=("AlbertAttention",),
        blocks=("AlbertLayer",),
        parts={
            "AlbertEmbeddings": Part(bert_embeddings, TABLE_SLOTS),
            "AlbertAttention": Part(albert_attention, _ATTENTION),
            "AlbertLayer": Part(layer, _LAYER, ends_block=True),
        },
        pooled=pooled,
        tiny={"embedding_size": 16, "num_hidden_groups": 1},
    ),
)
