"""Several ranks that train together: they exchange their answers and sum their gradients.

Each decision is taken by all or by none. All ranks call each method at the same points of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whet.config.arguments import TrainingArguments
from whet.config.ranks import LostRankError, Place
from whet.config.rules.sharing import runs_deepspeed, stage_of_run
from whet.dist.gradients import GradientSum, ReduceOptions
from whet.dist.group import Group, join
from whet.dist.tables import TableSum
from whet.dist.zero_engine import ZeroEngine
from whet.engine.sync import Sync
from whet.engine.zero import ShardedWeights
from whet.errors import ConfigError, WhetError
from whet.models.fused.layers import GRADIENT
from whet.store import schema
from whet.store.schema import Check
from whet.watch import stop

T = TypeVar("T")
_NAMES = tuple(one.name for one in stop.SIGNALS)
_DRIFT = 1e-4
"""Largest relative difference between the ranks' norms of one gradient; processors of two kinds differ by 1e-6."""


class ManyRanks(Sync):
    """One rank's view of a run that several ranks train together."""

    engine: ZeroEngine | None = None
    """DeepSpeed's engine, which then sums the gradients; from the start of a training on."""

    def __init__(self, group: Group, options: ReduceOptions, *, shares_weights: bool = False) -> None:
        self.group, self._options, self._shares_weights = group, options, shares_weights
        self.place: Place = group.place
        self.n_ranks = group.n_ranks
        self._sums: GradientSum | None = None
        self._shared: ShardedWeights | None = None
        """What sums the gradients in place of `_sums` if each rank keeps a part of them, as of the weights."""
        self._tables: TableSum | None = None
        self._is_last = False
        self._n_checks = 0
        self._known: set[int] = set()
        self._weights: list[nn.Parameter] = []
        self._buffers: list[Tensor] = []

    # ---- gradients ----

    def begin(self, model: nn.Module) -> None:
        self._weights, self._buffers = list(model.parameters()), list(model.buffers())
        self._known = {id(one) for one in self._weights if one.requires_grad}
        if self._shares_weights:
            self._sums = self._shared = None
            self.copy_from_first(model)
            return
        tables = _tables_of(model)
        self._tables = TableSum(self.group, [getattr(one, GRADIENT) for one in tables])
        self._sums = GradientSum(self.group, model, self._options, [one.weight for one in tables])

    def share(self, weights: ShardedWeights) -> None:
        """Let these sum the gradients, of which each rank keeps a part, as of the weights."""
        self._shared = weights

    def forward(self, work: Callable[[], T]) -> T:
        return work() if self._shared is None else self._shared.compute(work)

    def lost(self, error: RuntimeError) -> LostRankError | None:
        return self.group.lost(error)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def before_backward(self, loss: Tensor) -> Tensor:
        if self.engine is not None:
            return self.engine.watch(loss, is_last=self._is_last)
        sums = self._shared or self._sums
        return loss if sums is None or not self._is_last else sums.watch(loss)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.engine is not None:
            return
        sums = self._shared or self._sums
        assert sums is not None, "begin comes before the first step"
        others = [one for one in parameters if one.requires_grad and id(one) not in self._known]
        watched = sums.finish(others)
        if self._tables is not None:
            self._tables.reduce(1.0 if watched else 1 / self.n_ranks)

    def gradient_norm(self, norm: float) -> float:
        if self._shared is not None:
            return math.sqrt(float(self.group.sum_of(torch.tensor([norm], dtype=torch.float64).square())))
        held = norm if math.isfinite(norm) else math.inf
        weight = self._norm_of_a_weight()
        own = torch.tensor([held, -held, weight, -weight], dtype=torch.float64)
        largest, negative, heaviest, lightest = self.group.largest_of(own).tolist()
        if math.isfinite(largest) and largest + negative > _DRIFT * max(largest, 1e-12):
            raise _drifted("gradients after exchanging them", -negative, largest)
        if heaviest + lightest > _DRIFT * max(heaviest, 1e-12):
            raise _drifted("weights", -lightest, heaviest)
        return largest if math.isfinite(largest) else norm

    def _norm_of_a_weight(self) -> float:
        """Return the norm of one parameter, another one in each step: ranks whose weights differ are found."""
        self._n_checks += 1
        norm = float(self._weights[self._n_checks % len(self._weights)].detach().float().norm())
        return norm if math.isfinite(norm) else 0.0

    def total_targets(self, n_targets: int) -> int:
        return int(self.group.sum_of(torch.tensor([n_targets])).item())

    def total_loss(self, loss: Tensor) -> Tensor:
        return self.group.sum_of(loss.detach().reshape(()).double()).float()

    def total_counts(self, counts: Sequence[int]) -> list[int]:
        return [int(one) for one in self.group.sum_of(torch.tensor(list(counts))).tolist()]

    # ---- decisions ----

    def all_finite(self, finite: bool) -> bool:
        return not self.group.any_of(not finite)

    def stop_signal(self, name: str | None) -> str | None:
        code = 0 if name is None else _NAMES.index(name) + 1
        largest = int(self.group.largest_of(torch.tensor([code])).item())
        return _NAMES[largest - 1] if largest else None

    def memory_shortage(self, shortage: str | None) -> str | None:
        if not self.group.any_of(shortage is not None):
            return None
        of_ranks = self.group.gather(shortage, schema.optional(schema.text))
        found = [(rank, one) for rank, one in enumerate(of_ranks) if one is not None]
        return f"rank {found[0][0]}: {found[0][1]}"

    def stop_early(self, wanted: bool) -> bool:
        return self.group.any_of(wanted)

    def evaluate_now(self, due: bool) -> bool:
        return self._with_buffers(self.group.any_of(due))

    def save_now(self, due: bool) -> bool:
        return self._with_buffers(self.group.any_of(due))

    def _with_buffers(self, agreed: bool) -> bool:
        """Take over what rank 0's forward passes wrote to buffers, such as running means, before they are read."""
        if agreed:
            self.group.copy_from_first(self._buffers)
        return agreed

    def is_best(self, better: bool) -> bool:
        return self.group.any_of(better and self.place.is_first)

    def precision(self, name: str) -> str:
        return self.group.of_first(name, schema.text)

    def micro_batch_rows(self, n_rows: int) -> int:
        return -int(self.group.largest_of(torch.tensor([-n_rows])).item())

    # ---- what one rank did for all ----

    def of_first(self, value: T, valid: Check) -> T:
        return self.group.of_first(value, valid)

    def gather(self, value: T, valid: Check, *, large: bool = False) -> list[T]:
        return self.group.gather(value, valid, large=large)

    def in_order(self, own: Sequence[T], valid: Check = schema.anything) -> list[T]:
        found = self.group.gather(list(own), schema.list_of(valid), large=True)
        longest = max(map(len, found), default=0)
        return [of_rank[n] for n in range(longest) for of_rank in found if n < len(of_rank)]

    def copy_from_first(self, model: nn.Module) -> None:
        self.group.copy_from_first([*model.parameters(), *model.buffers()])

    def wait(self) -> None:
        self.group.wait()


def _drifted(what: str, least: float, most: float) -> WhetError:
    return WhetError(
        what=f"the ranks have different {what}",
        got=f"norms from {least:.6g} to {most:.6g}",
        why="every rank applies the same update, or their weights drift apart",
        fix="change gradients, weights and learning rates in callbacks and hooks in the same way on all ranks",
    )


def _tables_of(model: nn.Module) -> list[Any]:
    """Return the embedding tables that keep their gradients by rows, except those that another layer uses too."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = [part for part in model.modules() if hasattr(part, GRADIENT)]
    return [one for one in found if holders[id(one.weight)] == 1 and one.weight.requires_grad]


def joined(args: TrainingArguments) -> ManyRanks:
    """Return how the ranks of this process's run agree; this process joins them unless it has."""
    group = join(args.ddp_backend, args.ddp_timeout, on_gpu=args.device.type == "cuda")
    assert group is not None, "a process alone has nobody to join"
    _require_sums_before_updates(args, group.n_ranks)
    options = ReduceOptions(
        comm_hook=args.ddp_comm_hook, bucket_mb=args.ddp_bucket_cap_mb, find_unused=args.ddp_find_unused_parameters
    )
    return ManyRanks(group, options, shares_weights=stage_of_run(args) > 1 or runs_deepspeed(args))


def planned(args: TrainingArguments, place: Place) -> Sync:
    """Return the decisions of a rank whose run is planned: the others are not there."""
    _require_sums_before_updates(args, place.n_ranks)
    found = Sync()
    found.n_ranks, found.place = place.n_ranks, place
    return found


def _require_sums_before_updates(args: TrainingArguments, n_ranks: int) -> None:
    if args.optimizer_in_backward:
        raise ConfigError(
            what="optimizer_in_backward does not go with several ranks",
            got=f"{n_ranks} ranks",
            why="it updates a weight before the gradients of the ranks are summed",
            fix="leave --optimizer_in_backward out",
        )
