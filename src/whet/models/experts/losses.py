"""What the routers of a pass add to the loss, and how evenly they spread the tokens.

Every sum runs over the tokens of all rows, and the balance of a row depends on that row alone: batches, micro-batches
and ranks may split the rows of a step as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.experts.routing import Routes


@dataclass(frozen=True)
class RoutingSums:
    """Of one pass, each () float32: sums over its tokens and its sparse layers."""

    balance: Tensor
    """X sum_e f_e P_e of each row times its tokens (Fedus et al. 2021, equations 4 to 6); 1 for a token if even."""
    z: Tensor
    """The squared logarithm of the sum of the exponentials of the logits (Zoph et al. 2022, equation 5)."""
    largest: Tensor
    """The share of the busiest expert, times X, times the tokens: 1 for a token if even."""
    smallest: Tensor
    """The same of the least busy expert."""
    n_dropped: Tensor
    """Uses of experts that did not fit into the capacity."""

    def plus(self, other: RoutingSums) -> RoutingSums:
        """Return the sums of both, without a graph."""
        mine, theirs = vars(self), vars(other)
        return RoutingSums(**{name: mine[name].to(theirs[name].device) + theirs[name].detach() for name in mine})


def sums(seen: Sequence[Routes], rows: Tensor) -> RoutingSums:
    """Return the sums for routes of N tokens, given the row (N,) of each; a token of row -1 is not counted."""
    (real,) = (rows >= 0).nonzero(as_tuple=True)
    found = [_of_layer(routes, rows[real], real) for routes in seen]
    return RoutingSums(*(torch.stack([one[n] for one in found]).sum() for n in range(5)))


def _of_layer(routes: Routes, rows: Tensor, real: Tensor) -> tuple[Tensor, ...]:
    logits, experts = routes.logits.index_select(0, real), routes.experts.index_select(0, real)
    n_experts, top_k = logits.shape[1], experts.shape[1]
    lengths = rows.bincount().clamp(min=1)
    uses = (rows[:, None] * n_experts + experts).flatten().bincount(minlength=len(lengths) * n_experts)
    uses = uses.view(-1, n_experts)
    share_of_row = uses / (top_k * lengths[:, None])
    balance = n_experts * (logits.softmax(-1) * share_of_row.index_select(0, rows)).sum()
    z = logits.logsumexp(-1).square().sum()
    load = uses.sum(0) * (n_experts / top_k)
    kept = None if routes.kept is None else routes.kept.index_select(0, real)
    dropped = balance.new_zeros(()) if kept is None else (~kept).sum().float()
    return balance, z, load.max().float(), load.min().float(), dropped
