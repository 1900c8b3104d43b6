"""The parts of transformers' encoders between their matrix products, as whet's fused operators.

Each function stands in for the forward of one transformers class, reads that class's own submodules and gives what its
forward gives, to rounding. Products lose their bias to the operator behind them, and the three projections of attention
become one product. Outside of whet's own passes the class's own forward runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.attention.packed import attend, attend_joined
from whet.kernels.batch_position import BatchPosition, Site
from whet.kernels.layers import recompute
from whet.kernels.layers.activation import bias_act
from whet.kernels.layers.embedding import TAKES_THE_REST, RowGradient, embed
from whet.kernels.products.linear import linear
from whet.kernels.specs import AttentionSpec, Drop, Norm, Tables
from whet.models.binding import bound
from whet.models.ending import Ending, end
from whet.models.packed import PlacedDropout
from whet.models.standard import ACTIVATIONS, has_hooks, is_transformers_own, learn, why_called

GRADIENT = "whet_gradient"
"""Attribute of an embedding table that holds its RowGradient."""
PLACEMENT = "whet_placement"
"""Attribute of a module whose forward is one of these: the Placement of its model."""


def _position(module: Any, x: Tensor) -> BatchPosition | None:
    """Return where the running pass of whet stands; None where the module's own forward has to run on x (B, T, ...)."""
    placement = module.__dict__.get(PLACEMENT)
    position = placement.now if placement is not None and is_transformers_own(module) else None
    return position if position is not None and position.is_of(*x.shape[:2]) else None


def _product(x: Tensor, dense: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the product, and the bias that is still to be added; a module that must be called adds its own."""
    if why_called(dense, nn.Linear) is not None:
        return dense(x), None
    return linear(x, dense.weight), dense.bias


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)


def _residual_norm(
    product: Tensor, bias: Tensor | None, residual: Tensor, norm: nn.LayerNorm, dropout: nn.Module | None
) -> tuple[Tensor, Tensor, Ending] | Tensor:
    """Return product, residual and what is to follow: LayerNorm(residual + dropout(product + bias)).

    A norm that must be called is, and the result is a tensor.
    """
    called = dropout is not None and why_called(dropout, PlacedDropout) is not None
    norm_called = why_called(norm, nn.LayerNorm) is not None
    if dropout is not None and (called or norm_called):
        product, bias = dropout(_plus(product, bias)), None
    if norm_called:
        return norm(_plus(product, bias) + residual)
    drop = None if called or dropout is None else _drop(dropout)
    return product, residual, Ending(bias, Norm(norm.weight, norm.bias, norm.eps), drop)


def _finished(found: tuple[Tensor, Tensor, Ending] | Tensor) -> Tensor:
    """Return the norm's result."""
    if isinstance(found, Tensor):
        return found
    product, residual, ending = found
    return ending.finish(product, residual)


def _block_end(module: nn.Module, found: tuple[Tensor, Tensor, Ending] | Tensor) -> Tensor:
    """Return what `_finished` does; a checkpoint may leave it out of its block, unless a hook looks at the result."""
    return _finished(found) if isinstance(found, Tensor) or has_hooks(module) else end(*found)


def _attention(module: Any, x: Tensor, parts: tuple[nn.Linear, ...], heads: int, p: float) -> Tensor:
    """Return the attention output (1, N, D) of x through three projections: joined, unless one must be called."""
    site: Site = module.whet_site
    position = site.position
    assert position is not None
    drop = Drop(p, position, site.use()) if module.training and p > 0.0 else None
    spec = AttentionSpec(position.cu_seqlens, module.scaling, drop=drop, key_counts=position.key_counts)
    if _can_join(parts):
        return attend_joined(_joined(x, *parts)[0].unflatten(-1, (3, heads, -1)), spec).flatten(1)[None]
    q, k, v = (_with_bias(x, part)[0].unflatten(-1, (heads, -1)) for part in parts)
    return attend(q, k, v, spec).flatten(1)[None]


def _can_join(parts: tuple[nn.Linear, ...]) -> bool:
    if any(why_called(part, nn.Linear) is not None for part in parts):
        return False
    first = parts[0]
    return all(p.bias is not None and p.weight.dtype == first.weight.dtype for p in parts)


def _with_bias(x: Tensor, dense: nn.Linear) -> Tensor:
    if why_called(dense, nn.Linear) is not None:
        return dense(x)
    return linear(x, dense.weight, dense.bias)


def _joined(x: Tensor, *linears: nn.Linear) -> Tensor:
    """Return the linears' results side by side: one product instead of several."""

    def together() -> Tensor:
        return torch.cat([part.weight for part in linears])

    weight = together()
    recompute.register(weight, together)
    return linear(x, weight, torch.cat([part.bias for part in linears]), [part.weight for part in linears])


def _inner(x: Tensor, dense: nn.Linear, activation: Any) -> Tensor:
    """Return activation(dense(x))."""
    product, bias = _product(x, dense)
    if not isinstance(activation, nn.Module) or why_called(activation) is not None:
        return activation(_plus(product, bias))
    return bias_act(product, bias, ACTIVATIONS[type(activation)])


def _drop(dropout: Any) -> Drop | None:
    """Return the dropout of this use of a PlacedDropout; None where nothing is dropped."""
    if not dropout.training or dropout.p == 0.0:
        return None
    return Drop(dropout.p, dropout.site.position, dropout.site.use())


_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


def _embeddings(self: Any, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor | None:
    """Return the sum of the embeddings, normalised and dropped; None where one of the modules must be called."""
    tables = [getattr(self, name) for name in _TABLES if hasattr(self, name)]
    called = [why_called(table, nn.Embedding) for table in tables]
    called += [why_called(self.LayerNorm, nn.LayerNorm), why_called(self.dropout, PlacedDropout)]
    if any(called):
        return None
    ids = [input_ids[0], position_ids[0]]
    if len(tables) == len(_TABLES):
        ids.append(torch.zeros_like(ids[0]) if token_type_ids is None else token_type_ids[0])
    norm = Norm(self.LayerNorm.weight, self.LayerNorm.bias, self.LayerNorm.eps)
    summed = Tables(tuple(table.weight for table in tables), tuple(table.padding_idx for table in tables))
    gradients = [_row_gradient(table) for table in tables]
    return _as_products_are(embed(ids, summed, norm, drop=_drop(self.dropout), gradients=gradients))[None]


def _row_gradient(table: nn.Embedding) -> RowGradient | None:
    """Return what keeps the table's gradient between steps, unless somebody watches that gradient arrive."""
    found: RowGradient | None = table.__dict__.get(GRADIENT)
    if found is None or found.table is not table.weight or table.weight._backward_hooks:
        return None
    hooks = getattr(table.weight, "_post_accumulate_grad_hooks", None) or {}
    return found if all(hasattr(hook, TAKES_THE_REST) for hook in hooks.values()) else None


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
    found = None
    if input_ids is not None and position_ids is not None and _position(self, input_ids) is not None:
        found = _embeddings(self, input_ids, position_ids, token_type_ids)
    if found is None:
        return type(self).forward(self, input_ids, token_type_ids, position_ids, inputs_embeds, **rest)
    return found


def distilbert_embeddings(
    self: Any, input_ids: Tensor, input_embeds: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """DistilBERT's Embeddings."""
    found = None
    if input_ids is not None and position_ids is not None and _position(self, input_ids) is not None:
        found = _embeddings(self, input_ids, position_ids, None)
    return type(self).forward(self, input_ids, input_embeds, position_ids) if found is None else found


def bert_self_attention(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    """BertSelfAttention, and that of RoBERTa, XLM-R and ELECTRA."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    parts = (self.query, self.key, self.value)
    return _attention(self, hidden_states, parts, self.num_attention_heads, self.dropout.p), None


def bert_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertSelfOutput, and that of RoBERTa, XLM-R and ELECTRA."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, input_tensor)
    product, bias = _product(hidden_states, self.dense)
    return _finished(_residual_norm(product, bias, input_tensor, self.LayerNorm, self.dropout))


def bert_block_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertOutput, and that of RoBERTa, XLM-R and ELECTRA."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, input_tensor)
    product, bias = _product(hidden_states, self.dense)
    return _block_end(self, _residual_norm(product, bias, input_tensor, self.LayerNorm, self.dropout))


def bert_intermediate(self: Any, hidden_states: Tensor) -> Tensor:
    """BertIntermediate, and that of RoBERTa, XLM-R and ELECTRA."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states)
    return _inner(hidden_states, self.dense, self.intermediate_act_fn)


def distilbert_block(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
    """DistilBERT's TransformerBlock."""
    attention, ffn = self.attention, self.ffn
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    if _is_standard_part(attention):
        parts = (attention.q_lin, attention.k_lin, attention.v_lin)
        seen = _attention(attention, hidden_states, parts, attention.n_heads, attention.dropout.p)
        product, bias = _product(seen, attention.out_lin)
    else:
        product, bias = attention(hidden_states, *rest, **options)[0], None
    hidden_states = _finished(_residual_norm(product, bias, hidden_states, self.sa_layer_norm, None))
    if not _is_standard_part(ffn):
        return _finished(_residual_norm(ffn(hidden_states), None, hidden_states, self.output_layer_norm, None))
    product, bias = _product(_inner(hidden_states, ffn.lin1, ffn.activation), ffn.lin2)
    return _block_end(self, _residual_norm(product, bias, hidden_states, self.output_layer_norm, ffn.dropout))


def _is_standard_part(module: nn.Module) -> bool:
    """Return whether a block may do the work of this part of it itself, without calling it."""
    return is_transformers_own(module) and "forward" not in module.__dict__ and not has_hooks(module)


def albert_attention(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    """AlbertAttention, which holds the output product, the residual and the norm as well."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    parts = (self.query, self.key, self.value)
    seen = _attention(self, hidden_states, parts, self.num_attention_heads, self.attention_dropout.p)
    product, bias = _product(seen, self.dense)
    return _finished(_residual_norm(product, bias, hidden_states, self.LayerNorm, self.output_dropout)), None


def albert_layer(self: Any, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
    """AlbertLayer; its feed-forward part has no dropout."""
    if _position(self, hidden_states) is None:
        return type(self).forward(self, hidden_states, *rest, **options)
    seen, _ = self.attention(hidden_states, *rest, **options)
    product, bias = _product(_inner(seen, self.ffn, self.activation), self.ffn_output)
    return _block_end(self, _residual_norm(product, bias, seen, self.full_layer_layer_norm, None))


_Slots = dict[str, type[nn.Module] | None]


@dataclass(frozen=True)
class Part:
    """A class of transformers that an operator stands in for."""

    forward: Callable[..., Any]
    slots: _Slots
    """Its submodules that are not called: paths, and the class that each stands for (None: an activation)."""


_TABLE_SLOTS: _Slots = {**dict.fromkeys(_TABLES, nn.Embedding), "LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}
_PROJECTIONS: _Slots = {"query": nn.Linear, "key": nn.Linear, "value": nn.Linear}
_OUTPUT: _Slots = {"dense": nn.Linear, "LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}
_BERT_PARTS: dict[str, Part] = {
    "Embeddings": Part(bert_embeddings, _TABLE_SLOTS),
    "SelfAttention": Part(bert_self_attention, _PROJECTIONS),
    "SelfOutput": Part(bert_output, _OUTPUT),
    "Intermediate": Part(bert_intermediate, {"dense": nn.Linear, "intermediate_act_fn": None}),
    "Output": Part(bert_block_output, _OUTPUT),
}
_DISTILBERT_BLOCK: _Slots = {
    **{f"attention.{name}": nn.Linear for name in ("q_lin", "k_lin", "v_lin", "out_lin")},
    "sa_layer_norm": nn.LayerNorm,
    "output_layer_norm": nn.LayerNorm,
    "ffn.lin1": nn.Linear,
    "ffn.activation": None,
    "ffn.lin2": nn.Linear,
    "ffn.dropout": PlacedDropout,
}
_ALBERT_ATTENTION: _Slots = _PROJECTIONS | {
    "dense": nn.Linear,
    "LayerNorm": nn.LayerNorm,
    "output_dropout": PlacedDropout,
}
_ALBERT_LAYER: _Slots = {
    "ffn": nn.Linear,
    "activation": None,
    "ffn_output": nn.Linear,
    "full_layer_layer_norm": nn.LayerNorm,
}
PARTS: dict[str, Part] = {
    f"{family}{part}": found
    for family in ("Bert", "Roberta", "XLMRoberta", "Electra")
    for part, found in _BERT_PARTS.items()
} | {
    "Embeddings": Part(distilbert_embeddings, _TABLE_SLOTS),
    "TransformerBlock": Part(distilbert_block, _DISTILBERT_BLOCK),
    "AlbertEmbeddings": Part(bert_embeddings, _TABLE_SLOTS),
    "AlbertAttention": Part(albert_attention, _ALBERT_ATTENTION),
    "AlbertLayer": Part(albert_layer, _ALBERT_LAYER),
}
"""What stands in for each class of transformers, by class name."""

_ENDS = (bert_block_output, distilbert_block, albert_layer)


def part_of(module: nn.Module) -> Part | None:
    """Return what may stand in for the module's forward; None for any class but transformers' own."""
    return PARTS.get(type(module).__name__) if learn(type(module)) else None


def is_fused(module: nn.Module) -> bool:
    """Return whether an operator stands in for the module's forward now."""
    forward = bound(module)
    return any(forward is one for one in _FORWARDS)


def ends_a_block(module: nn.Module) -> bool:
    """Return whether this is a module that its block's result comes from."""
    part = part_of(module)
    return part is not None and part.forward in _ENDS


def called(module: nn.Module) -> dict[str, str]:
    """Return which submodules of a fused module are called all the same, and why."""
    part, found = PARTS[type(module).__name__], {}
    for path, standard in part.slots.items():
        try:
            slot = module.get_submodule(path)
        except AttributeError:
            continue
        if (why := why_called(slot, standard)) is not None:
            found[path] = why
    return found


_FORWARDS = {part.forward for part in PARTS.values()}
