"""The bytes that a rank will hold of weights, gradients and the optimizer's state, before it holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from whet.config.ranks import Place
from whet.config.rules.sharing import stage_of_run
from whet.dist.shares import deal
from whet.optim import divisible, registry

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_STATE, _GRADIENTS, _WEIGHTS = 1, 2, 2
"""The first stage that shares each; stage 2 keeps the weights of a block longer than stage 3, not between steps."""


@dataclass(frozen=True)
class Planned:
    """Bytes that one rank holds between two steps; gradients until the optimizer's step is done."""

    weights: int
    gradients: int
    state: int | None
    """None: the optimizer is not one of whet's, so that its state is not known before the first step."""


def of_rank(
    model: nn.Module, args: TrainingArguments, optimizer: Optimizer | None, place: Place, *, known: bool = True
) -> Planned:
    """Return what this rank will hold. `known`: whether the arguments name the optimizer."""
    weights = list(model.parameters())
    trained = [one for one in weights if one.requires_grad]
    stage = stage_of_run(args) if place.n_ranks > 1 and optimizer is not None else 0
    kept = _kept(weights, place, None if optimizer is None else divisible.unit_of(optimizer))
    gradients = 0 if args.optimizer_in_backward else _bytes(trained, kept if stage >= _GRADIENTS else None)
    return Planned(
        weights=_bytes(weights, kept if stage >= _WEIGHTS else None),
        gradients=gradients,
        state=registry.model_state_bytes(model, args, kept if stage >= _STATE else None) if known else None,
    )


def _kept(parameters: Sequence[nn.Parameter], place: Place, unit: int | None) -> Mapping[int, int]:
    """Return how many rows of each parameter this rank keeps, by its id."""
    rows = deal([one.shape for one in parameters], place.n_ranks, unit)
    return {id(one): of_ranks[place.rank][1] for one, of_ranks in zip(parameters, rows, strict=True)}


def _bytes(parameters: Sequence[nn.Parameter], kept: Mapping[int, int] | None) -> int:
    total = 0
    for one in parameters:
        n_elements = one.numel() if kept is None else kept[id(one)] * prod(one.shape[1:])
        total += n_elements * one.element_size()
    return total
