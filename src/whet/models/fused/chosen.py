"""The tokens that the last block computes, where a pass reads the hidden states of those alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.kernels.attention_spec import AttentionSpec, Bias
from whet.kernels.batch_position import BatchPosition, Chosen, running_position
from whet.kernels.packed_attention import attend


def chosen_from(attention: nn.Module, position: BatchPosition | None) -> Chosen | None:
    """Return the chosen tokens if this attention is where they begin."""
    found = None if position is None else position.chosen
    return found if found is not None and found.begins_at is attention else None


def require_all(attention: nn.Module, n_tokens: int, position: BatchPosition) -> None:
    """Raise ConfigError if these are the hidden states of the chosen tokens alone: attention needs those of all."""
    if torch.compiler.is_compiling() or n_tokens == len(position.slots):
        return
    raise ConfigError(
        what="an attention runs behind the block that leaves tokens out",
        got=f"{type(attention).__name__} with the hidden states of {n_tokens} of {len(position.slots)} tokens",
        why="the encoder runs its last block more than once, or another block after it, which whet cannot see",
        fix='compute all tokens there: whet.optimize(model, last_block_tokens="all"), or last_block_tokens="all" in '
        "the TrainingArguments",
    )


def of_chosen(found: Tensor, attention: nn.Module, position: BatchPosition | None) -> Tensor:
    """Return an attention's output (1, N, D), or where the chosen tokens begin theirs alone, (1, M, D)."""
    chosen = chosen_from(attention, position)
    return found if chosen is None else found.index_select(1, chosen.tokens)


def attend_chosen(
    qkv: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec, chosen: Chosen, bias: Bias | None = None
) -> Tensor:
    """Return the attention (M, H, K) of the chosen tokens' queries (M, H, K), on keys and values (N, H, K) of all.

    The other tokens' queries are zeros, and nobody reads their results: the operator finds each query, and its dropout
    mask, at its place among all tokens.
    """
    q, k, v = qkv
    every = q.new_zeros(k.shape[0], *q.shape[1:]).index_copy(0, chosen.tokens, q)
    return attend(every, k, v, spec, bias).index_select(0, chosen.tokens)


def residual_for(result: Tensor, residual: Tensor) -> Tensor:
    """Return the residual (1, N, D) for the tokens that `result` holds: (1, N, D), or (1, M, D) of the chosen ones."""
    if torch.compiler.is_compiling() or result.shape[1] == residual.shape[1]:
        return residual
    position = running_position()
    assert position is not None
    assert position.chosen is not None
    return residual.index_select(1, position.chosen.tokens)
