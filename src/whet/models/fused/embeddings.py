"""The sum of embedding tables, its norm and its dropout, as one operator."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.kernels.embedding import TAKES_THE_REST, RowGradient, Tables, embed
from whet.models.family import Slots
from whet.models.fused.layers import PlacedDropout, as_products_are, drop_of, layer_norm_of
from whet.models.standard import why_called

GRADIENT = "whet_gradient"
"""Attribute of an embedding table that holds its RowGradient."""
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
TABLE_SLOTS: Slots = {**dict.fromkeys(_TABLES, nn.Embedding), "LayerNorm": nn.LayerNorm, "dropout": PlacedDropout}
"""What `embeddings` reads."""


@dataclass(frozen=True)
class EmbeddingNames:
    """The names of an embedding module's parts; tables of words, positions and segments, in this order."""

    tables: tuple[str, ...] = _TABLES
    norm: str = "LayerNorm"
    dropout: str = "dropout"


def embeddings(
    module: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    names: EmbeddingNames = EmbeddingNames(),
) -> Tensor | None:
    """Return the normalised sum (1, N, D) of the embeddings of ids (1, N).

    None if a submodule must be called, or the module has another one with weights: it computes more than this sum.
    """
    columns = zip(names.tables, (input_ids, position_ids, token_type_ids), strict=False)
    given = [(table, ids) for name, ids in columns if (table := getattr(module, name, None)) is not None]
    tables = [table for table, _ in given]
    layer, dropout = getattr(module, names.norm), getattr(module, names.dropout)
    called = [why_called(table, nn.Embedding) for table in tables]
    norm = layer_norm_of(layer)
    if norm is None or why_called(dropout, PlacedDropout) is not None or any(called) or _has_more(module, names):
        return None
    ids = [torch.zeros_like(input_ids[0]) if one is None else one[0] for _, one in given]
    norm = replace(norm, bias=torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)
    summed = Tables(tuple(table.weight for table in tables), tuple(table.padding_idx for table in tables))
    gradients = [_row_gradient(table) for table in tables]
    return as_products_are(embed(ids, summed, norm, drop=drop_of(dropout), gradients=gradients))[None]


def _has_more(module: nn.Module, names: EmbeddingNames) -> bool:
    """Return whether the module has weights that the sum does not read, such as a table of a kind of its own."""
    read = (*names.tables, names.norm, names.dropout)
    others = [one for name, one in module._modules.items() if name not in read and one is not None]
    return bool(module._parameters) or any(True for one in others for _ in one.parameters())


def _row_gradient(table: nn.Embedding) -> RowGradient | None:
    """Return what keeps the table's gradient between steps, unless somebody watches that gradient arrive."""
    found: RowGradient | None = table.__dict__.get(GRADIENT)
    if found is None or found.table is not table.weight or table.weight._backward_hooks:
        return None
    hooks = getattr(table.weight, "_post_accumulate_grad_hooks", None) or {}
    return found if all(hasattr(hook, TAKES_THE_REST) for hook in hooks.values()) else None
