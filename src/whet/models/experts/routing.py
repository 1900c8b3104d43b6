"""Which experts compute a token, and in which order (Shazeer et al. 2017; Lepikhin et al. 2020; Fedus et al. 2021).

Also what the routers of a pass add to the loss. Every sum runs over the tokens of all rows, and the balance of a row
depends on that row alone: batches, micro-batches and ranks may split the rows of a step as they like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """The experts of N tokens in one layer."""

    logits: Tensor
    """(N, X) float32, of the router."""
    experts: Tensor
    """(N, top_k), the best first."""
    weights: Tensor
    """(N, top_k) float32: factors of the experts' results; they sum to 1 for each token."""
    kept: Tensor | None = None
    """(N, top_k) bool: which of these fit into the capacity; None: all."""


@dataclass(frozen=True)
class Sorted:
    """All uses of experts (N top_k), sorted by expert; uses that no expert takes come last."""

    uses: Tensor
    """Each sorted use as token * top_k + rank."""
    tokens: Tensor
    """Its token."""
    places: Tensor
    """(N top_k): where the use of each token and rank lies among the sorted ones."""
    ends: list[int]
    """Where the uses of each expert end."""


_WATCH: ContextVar[list[Routes] | None] = ContextVar("whet_watched_routes", default=None)
"""Where the layers of the running forward pass leave their routes."""


@contextmanager
def watched(found: list[Routes]) -> Iterator[None]:
    """Run a forward pass whose sparse layers append their routes to `found`; a recomputation appends none."""
    token = _WATCH.set(found)
    try:
        yield
    finally:
        _WATCH.reset(token)


def unwatched() -> AbstractContextManager[None]:
    """Return the context of a pass within a watched one whose routes are not the watcher's, as a teacher's."""
    return watched([])


def note(routes: Routes) -> None:
    """Leave the routes of a layer for whoever watches the pass."""
    found = _WATCH.get()
    if found is not None:
        found.append(routes)


def chosen(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the experts (N, top_k) of each token and their weights, which sum to 1: upcycled experts begin as one.

    A single weight is 1 and has the gradient of its probability, which is the gradient that Switch's router gets.
    """
    top, experts = logits.softmax(-1).topk(top_k, dim=-1)
    return experts, 1.0 + (top - top.detach()) if top_k == 1 else top / top.sum(-1, keepdim=True)


def within_capacity(experts: Tensor, rows: Tensor, factor: float, n_experts: int) -> Tensor:
    """Return which uses (N, top_k) fit: an expert takes factor * top_k * T / X uses of a row of T tokens, rounded up.

    A row is a group of GShard (section 2.2): what is dropped does not depend on the other rows of a batch. First
    choices come before second ones, and earlier tokens before later ones. Tokens of row -1 are padding: none fits.
    """
    top_k = experts.shape[1]
    if bool((rows < 0).any()):
        real = rows >= 0
        kept = torch.zeros_like(experts, dtype=torch.bool)
        kept[real] = within_capacity(experts[real], rows[real], factor, n_experts)
        return kept
    capacity = (rows.bincount() * (factor * top_k / n_experts)).ceil().long()
    groups = (rows[:, None] * n_experts + experts).t().flatten()
    order = groups.argsort(stable=True)
    n_of_group = groups.bincount(minlength=1)
    first = n_of_group.cumsum(0) - n_of_group
    ranks = torch.empty_like(groups)
    ranks[order] = torch.arange(len(groups), device=groups.device) - first[groups[order]]
    return (ranks < capacity[rows].repeat(top_k)).view(top_k, -1).t()


def by_expert(experts: Tensor, n_experts: int, kept: Tensor | None = None) -> Sorted:
    """Return the uses (N, top_k) of the experts in the order in which the experts compute them, `kept` ones alone."""
    top_k = experts.shape[1]
    experts = experts if kept is None else experts.masked_fill(~kept, n_experts)
    ids, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = ids.bincount(minlength=n_experts + 1)[:n_experts]
    return Sorted(order, order // top_k, places, counts.cumsum(0).tolist())


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


def routing_sums(seen: Sequence[Routes], rows: Tensor) -> RoutingSums:
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
