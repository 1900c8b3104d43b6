"""The hidden states of padding tokens in models that mask both sides of a pair: DeBERTa.

There, padding has embeddings of 0, and a padding token attends to all places of its row alike, to padding too. So all
padding tokens of a row have the same state, and one that is computed represents any number of others exactly.
"""

import torch
from torch import Tensor

from whet.kernels.batch_position import BatchPosition


def without_padding(x: Tensor, position: BatchPosition) -> Tensor:
    """Return x (1, N, D) with zeros for padding tokens."""
    return x if position.sizes is None else x.masked_fill(_is_padding(position)[0][None, :, None], 0.0)


def mean_of_row(found: Tensor, values: Tensor, position: BatchPosition) -> Tensor:
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
