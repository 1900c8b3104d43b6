"""DistilBERT: no segments, and a block whose parts are not modules of their own."""

from typing import Any

from torch import Tensor, nn

from whet.models.family import Family, FeedForward, Part, Slots
from whet.models.fused.attention import attention, rate
from whet.models.fused.layers import (
    TABLE_SLOTS,
    PlacedDropout,
    block_end,
    embeddings,
    finished,
    inner,
    is_plain,
    pass_position,
    product,
    residual_norm,
)
from whet.models.fused.limits import require_understood


def distilbert_embeddings(
    self: Any, input_ids: Tensor, input_embeds: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """Return the embeddings (B, T, D)."""
    found = None
    if input_ids is not None and position_ids is not None and pass_position(self, input_ids) is not None:
        found = embeddings(self, input_ids, position_ids, None)
    return type(self).forward(self, input_ids, input_embeds, position_ids) if found is None else found


def block(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
    """Return the block's result (B, T, D)."""
    attended, ffn = self.attention, self.ffn
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, attention_mask, *rest, **options)
    require_understood(attended, attention_mask, options)
    if is_plain(attended):
        parts = (attended.q_lin, attended.k_lin, attended.v_lin)
        seen = attention(attended, hidden_states, parts, attended.n_heads, rate(attended, attended.dropout))
        found = product(seen, attended.out_lin)
    else:
        found = attended(hidden_states, attention_mask, *rest, **options)[0], None
    hidden_states = finished(residual_norm(found, hidden_states, self.sa_layer_norm, None))
    if not is_plain(ffn):
        return finished(residual_norm((ffn(hidden_states), None), hidden_states, self.output_layer_norm, None))
    found = product(inner(hidden_states, ffn.lin1, ffn.activation), ffn.lin2)
    return block_end(self, residual_norm(found, hidden_states, self.output_layer_norm, ffn.dropout))


_BLOCK: Slots = {
    **{f"attention.{name}": nn.Linear for name in ("q_lin", "k_lin", "v_lin", "out_lin")},
    "sa_layer_norm": nn.LayerNorm,
    "output_layer_norm": nn.LayerNorm,
    "ffn.lin1": nn.Linear,
    "ffn.activation": None,
    "ffn.lin2": nn.Linear,
    "ffn.dropout": PlacedDropout,
}

PACKAGES = ("transformers.models.distilbert",)
FAMILIES = (
    Family(
        model_types=("distilbert",),
        package=PACKAGES[0],
        attention=("DistilBertSelfAttention",),
        blocks=("TransformerBlock",),
        stack="transformer.layer",
        parts={
            "Embeddings": Part(distilbert_embeddings, TABLE_SLOTS),
            "TransformerBlock": Part(block, _BLOCK, ends_block=True),
        },
        feed_forward=FeedForward(
            path="ffn", up=("ffn.lin1",), down="ffn.lin2", activation="ffn.activation", dropout="ffn.dropout"
        ),
        tiny={"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
)
