"""BERT, and families with its modules under other names: ELECTRA, ERNIE, RoBERTa, CamemBERT, Data2Vec, XLM-RoBERTa."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from whet.models.family import Family, FeedForward, Part, Slots, after_padding
from whet.models.fused.attention import attention, rate
from whet.models.fused.layers import (
    TABLE_SLOTS,
    PlacedDropout,
    block_end,
    embeddings,
    finished,
    inner,
    pass_position,
    product,
    residual_norm,
)
from whet.models.fused.limits import require_understood


def bert_embeddings(
    self: Any,
    input_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Return the embeddings (B, T, D)."""
    found = None
    if input_ids is not None and position_ids is not None and pass_position(self, input_ids) is not None:
        found = embeddings(self, input_ids, position_ids, token_type_ids)
    if found is None:
        given = {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        return type(self).forward(self, input_ids, **given, **rest)
    return found


def self_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *rest: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention output (B, T, D)."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, attention_mask, *rest, **options)
    require_understood(self, attention_mask, options)
    parts = (self.query, self.key, self.value)
    return attention(self, hidden_states, parts, self.num_attention_heads, rate(self, self.dropout)), None


def attention_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Return the first norm of a block."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, input_tensor)
    found = product(hidden_states, self.dense)
    return finished(residual_norm(found, input_tensor, self.LayerNorm, self.dropout))


def intermediate(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the activations (B, T, F) of the feed-forward part."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states)
    return inner(hidden_states, self.dense, self.intermediate_act_fn)


def block_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Return the second norm of a block."""
    if pass_position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, input_tensor)
    found = product(hidden_states, self.dense)
    return block_end(self, residual_norm(found, input_tensor, self.LayerNorm, self.dropout))


PROJECTIONS: Slots = {"query": nn.Linear, "key": nn.Linear, "value": nn.Linear}
OUTPUT: Slots = {"dense": nn.Linear, "LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}


def parts(prefix: str) -> Mapping[str, Part]:
    """Return the fused parts of a family whose classes are BERT's under another name: `prefix` in place of `Bert`."""
    return {
        f"{prefix}Embeddings": Part(bert_embeddings, TABLE_SLOTS),
        f"{prefix}SelfAttention": Part(self_attention, PROJECTIONS),
        f"{prefix}SelfOutput": Part(attention_output, OUTPUT),
        f"{prefix}Intermediate": Part(intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
        f"{prefix}Output": Part(block_output, OUTPUT, ends_block=True),
    }


FEED_FORWARD = FeedForward(
    path="intermediate",
    up=("intermediate.dense",),
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
)


def like_bert(model_type: str, prefix: str, **differences: Any) -> Family:
    """Return a family whose classes are BERT's under another name: `prefix` in place of `Bert`.

    They are those of transformers' package of this type; `package=` names another module, as any field is changed.
    """
    package = model_type.replace("-", "_")
    settings: dict[str, Any] = {
        "model_types": (model_type,),
        "package": f"transformers.models.{package}",
        "attention": (f"{prefix}SelfAttention",),
        "blocks": (f"{prefix}Layer",),
        "stack": "encoder.layer",
        "parts": parts(prefix),
        "feed_forward": FEED_FORWARD,
    }
    return Family(**settings | differences)


_ROBERTA = {"first_position": after_padding, "skips_padding": True}
_FUSED_OF_XL = ("XLMRobertaXLSelfAttention", "XLMRobertaXLIntermediate")
"""Its norms come before attention and feed-forward. Norms, residuals and embeddings are torch's own: no fused piece has
this order yet."""

PACKAGES = (
    "transformers.models.bert",
    "transformers.models.electra",
    "transformers.models.ernie",
    "transformers.models.roberta",
    "transformers.models.camembert",
    "transformers.models.data2vec",
    "transformers.models.xlm_roberta",
    "transformers.models.xlm_roberta_xl",
)
FAMILIES = (
    like_bert("bert", "Bert"),
    like_bert("electra", "Electra", tiny={"embedding_size": 16}),
    like_bert("ernie", "Ernie"),
    like_bert("roberta", "Roberta", **_ROBERTA),
    like_bert("camembert", "Camembert", **_ROBERTA),
    like_bert("data2vec-text", "Data2VecText", package="transformers.models.data2vec", **_ROBERTA),
    like_bert("xlm-roberta", "XLMRoberta", **_ROBERTA),
    like_bert(
        "xlm-roberta-xl",
        "XLMRobertaXL",
        **_ROBERTA,
        parts={name: parts("XLMRobertaXL")[name] for name in _FUSED_OF_XL},
        stack=None,
    ),
)
