"""The parts of transformers' encoders between their matrix products, as whet's fused operators.

Each function stands in for the forward of one transformers class, reads that class's own submodules and gives what its
forward gives, to rounding. Products lose their bias to the operator behind them, and the three projections of attention
become one product. Outside of whet's own passes the class's own forward runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels import remake
from whet.kernels.fused import add_norm, bias_act
from whet.kernels.fused_attention import attend_joined
from whet.kernels.fused_embedding import RowGradient, embed
from whet.kernels.place import Place, Site
from whet.kernels.product import linear
from whet.kernels.reference import AttentionSpec, Drop, Kind, Norm, Tables
from whet.models.ending import Ending, end

GRADIENT = "whet_gradient"
"""Attribute of an embedding table that holds its RowGradient."""


def _residual_norm(x: Tensor, dense: nn.Linear, residual: Tensor, norm: nn.LayerNorm, drop: Drop | None) -> Tensor:
    """Return LayerNorm(residual + dropout(dense(x)))."""
    product = linear(x, dense.weight).to(residual.dtype)
    weights = Norm(norm.weight, norm.bias, norm.eps)
    return add_norm(product, residual, weights, linear_bias=dense.bias, drop=drop)[0]


def _block_end(x: Tensor, dense: nn.Linear, residual: Tensor, norm: nn.LayerNorm, drop: Drop | None) -> Tensor:
    """Return what `_residual_norm` does; a checkpoint may leave it out of its block."""
    weights = Norm(norm.weight, norm.bias, norm.eps)
    return end(linear(x, dense.weight), residual, Ending(dense.bias, weights, drop))


def _joined(x: Tensor, *linears: nn.Linear) -> Tensor:
    """Return the linears' results side by side: one product instead of several."""

    def together() -> Tensor:
        return torch.cat([part.weight for part in linears])

    weight = together()
    remake.offer(weight, together)
    return linear(x, weight, torch.cat([part.bias for part in linears]), [part.weight for part in linears])


def _attention(module: Any, joined: Tensor, heads: int, site: Site, place: Place, p: float) -> Tensor:
    """Return the attention output (1, N, D) of joined projections (1, N, 3 D)."""
    qkv = joined[0].unflatten(-1, (3, heads, -1))
    drop = Drop(p, place, site.use()) if module.training and p > 0.0 else None
    return attend_joined(
        qkv, AttentionSpec(place.row_starts, module.scaling, drop=drop, key_counts=place.key_counts)
    ).flatten(1)[None]


def _drop(dropout: Any) -> Drop | None:
    """Return the dropout of this use of a PlacedDropout; None where nothing is dropped."""
    if not dropout.training or dropout.p == 0.0:
        return None
    return Drop(dropout.p, dropout.site.place, dropout.site.use())


def _kind(activation: nn.Module) -> Kind:
    return KINDS[type(activation).__name__]


KINDS: dict[str, Kind] = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
    "SiLU": "silu",
}
"""Activation classes that have a fused operator."""


def _embeddings(self: Any, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
    tables = [self.word_embeddings, self.position_embeddings]
    ids = [input_ids[0], position_ids[0]]
    if hasattr(self, "token_type_embeddings"):
        tables.append(self.token_type_embeddings)
        ids.append(torch.zeros_like(ids[0]) if token_type_ids is None else token_type_ids[0])
    gradients: list[RowGradient | None] = [getattr(table, GRADIENT, None) for table in tables]
    norm = Norm(self.LayerNorm.weight, self.LayerNorm.bias, self.LayerNorm.eps)
    summed = Tables(tuple(table.weight for table in tables), tuple(table.padding_idx for table in tables))
    return _as_products_are(embed(ids, summed, norm, drop=_drop(self.dropout), gradients=gradients))[None]


def _as_products_are(x: Tensor) -> Tensor:
    """Return x in bf16 where the CPU's products are: what lies between blocks then needs no copies in two formats.

    The norms' own arithmetic stays in fp32. fp16, whose numbers end at 65,504, keeps its sums in fp32.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype("cpu") is torch.bfloat16 else x


def bert_embeddings(
    self: Any,
    input_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """BertEmbeddings, and those of RoBERTa, XLM-R, ELECTRA and ALBERT."""
    if self.dropout.site.place is None or input_ids is None or position_ids is None:
        return type(self).forward(self, input_ids, token_type_ids, position_ids, inputs_embeds, **rest)
    return _embeddings(self, input_ids, position_ids, token_type_ids)


def distilbert_embeddings(
    self: Any, input_ids: Tensor, input_embeds: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """DistilBERT's Embeddings."""
    if self.dropout.site.place is None or input_ids is None or position_ids is None:
        return type(self).forward(self, input_ids, input_embeds, position_ids)
    return _embeddings(self, input_ids, position_ids, None)


def bert_self_attention(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    """BertSelfAttention, and that of RoBERTa, XLM-R and ELECTRA."""
    place = self.whet_site.place
    if place is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    joined = _joined(hidden_states, self.query, self.key, self.value)
    return _attention(self, joined, self.num_attention_heads, self.whet_site, place, self.dropout.p), None


def bert_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertSelfOutput, and that of RoBERTa, XLM-R and ELECTRA."""
    if self.dropout.site.place is None:
        return type(self).forward(self, hidden_states, input_tensor)
    return _residual_norm(hidden_states, self.dense, input_tensor, self.LayerNorm, _drop(self.dropout))


def bert_block_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertOutput, and that of RoBERTa, XLM-R and ELECTRA."""
    if self.dropout.site.place is None:
        return type(self).forward(self, hidden_states, input_tensor)
    return _block_end(hidden_states, self.dense, input_tensor, self.LayerNorm, _drop(self.dropout))


def bert_intermediate(self: Any, hidden_states: Tensor) -> Tensor:
    """BertIntermediate, and that of RoBERTa, XLM-R and ELECTRA."""
    product = linear(hidden_states, self.dense.weight)
    return bias_act(product, self.dense.bias, _kind(self.intermediate_act_fn))


def distilbert_block(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
    """DistilBERT's TransformerBlock."""
    attention, ffn = self.attention, self.ffn
    place = attention.whet_site.place
    if place is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    joined = _joined(hidden_states, attention.q_lin, attention.k_lin, attention.v_lin)
    seen = _attention(attention, joined, attention.n_heads, attention.whet_site, place, attention.dropout.p)
    hidden_states = _residual_norm(seen, attention.out_lin, hidden_states, self.sa_layer_norm, None)
    inner = bias_act(linear(hidden_states, ffn.lin1.weight), ffn.lin1.bias, _kind(ffn.activation))
    return _block_end(inner, ffn.lin2, hidden_states, self.output_layer_norm, _drop(ffn.dropout))


def albert_attention(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    """AlbertAttention, which holds the output product, the residual and the norm as well."""
    place = self.whet_site.place
    if place is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    joined = _joined(hidden_states, self.query, self.key, self.value)
    heads, p = self.num_attention_heads, self.attention_dropout.p
    seen = _attention(self, joined, heads, self.whet_site, place, p)
    return _residual_norm(seen, self.dense, hidden_states, self.LayerNorm, _drop(self.output_dropout)), None


def albert_layer(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
    """AlbertLayer; its feed-forward part has no dropout."""
    if self.attention.whet_site.place is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    seen, _ = self.attention(hidden_states, *rest, **options)
    inner = bias_act(linear(seen, self.ffn.weight), self.ffn.bias, _kind(self.activation))
    return _block_end(inner, self.ffn_output, seen, self.full_layer_layer_norm, None)


_BERT_PARTS: dict[str, Callable[..., Any]] = {
    "Embeddings": bert_embeddings,
    "SelfAttention": bert_self_attention,
    "SelfOutput": bert_output,
    "Intermediate": bert_intermediate,
    "Output": bert_block_output,
}

_ENDING = (bert_block_output, distilbert_block, albert_layer)

FORWARDS: dict[str, Callable[..., Any]] = {
    f"{family}{part}": forward
    for family in ("Bert", "Roberta", "XLMRoberta", "Electra")
    for part, forward in _BERT_PARTS.items()
} | {
    "Embeddings": distilbert_embeddings,
    "TransformerBlock": distilbert_block,
    "AlbertEmbeddings": bert_embeddings,
    "AlbertAttention": albert_attention,
    "AlbertLayer": albert_layer,
}
"""The forward that stands in for each transformers class, by class name."""

ENDS = frozenset(name for name, forward in FORWARDS.items() if forward in _ENDING)
"""Class names of the modules that end a block."""
