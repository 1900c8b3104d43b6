"""The plan of a run and its batches: which rows make which step and micro-batch, and which of them this rank computes.

A row is followed from here to the weights: `make_plan` orders the rows, `BatchLoader` makes the micro-batches of a step
through the run's objective, and `step.py` trains on them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config.arguments import TrainingArguments
from whet.config.rules.memory import PREFETCH_FACTOR
from whet.data import budget
from whet.data.batch import Batch
from whet.data.order import (
    REBALANCE_SEED,
    StepOrder,
    grouped_by_length,
    lengths_of,
    n_rebalanced,
    rebalanced,
    sequential,
    shuffled,
)
from whet.data.store import RowStore
from whet.engine.draws import Draws
from whet.engine.run import Interval, Run, RunPlan
from whet.errors import DataError
from whet.log import logger
from whet.store import schema
from whet.store.state import State

if TYPE_CHECKING:
    from whet.data.prefetch import Piece, Prefetcher


def make_plan(args: TrainingArguments, dataset: Any) -> RunPlan:
    """Return the plan of a run over the data set; raises DataError if batches must be full and no batch is."""
    order = _order(args, dataset)
    if order.batches_per_epoch == 0:
        raise DataError(
            what="dataloader_drop_last leaves no rows to train on",
            got=f"{len(dataset)} rows, {order.rows_per_batch} in the smallest batch that is kept",
            why="it drops a batch that is not full, and no batch is full",
            fix="lower --per_device_train_batch_size, or leave --dataloader_drop_last out",
        )
    n_steps = args.max_steps
    if n_steps <= 0:
        n_steps = max(math.ceil(args.num_train_epochs * order.steps_per_epoch), args.min_steps or 0)
    return RunPlan(
        order=order,
        order_rule=_order_rule(args),
        n_steps=n_steps,
        n_epochs=math.ceil(n_steps / order.steps_per_epoch),
        log=_interval(args.logging_strategy, args.logging_steps, n_steps, order),
        evaluate=_evaluations(args, n_steps, order),
        save=_interval(args.save_strategy, args.save_steps, n_steps, order),
    )


def _order(args: TrainingArguments, dataset: Any) -> StepOrder:
    """Return which rows make which step, by `train_sampling_strategy`."""
    n_rows, strategy = len(dataset), args.train_sampling_strategy
    rows_per_step, batches = args.train_rows_per_step, args.gradient_accumulation_steps
    seed = args.seed if args.data_seed is None else args.data_seed
    if strategy == "batch_rebalance":  # its batches hold different numbers of rows: only a step has a fixed number
        lengths = lengths_of(dataset, args.length_column_name)
        seed = REBALANCE_SEED if args.data_seed is None else seed
        if not args.dataloader_drop_last:
            n_rows = n_rebalanced(n_rows, rows_per_step, batches)
        epochs = rebalanced(lengths, rows_per_step, batches, seed)
        return StepOrder(
            epochs=epochs, n_rows=n_rows, rows_per_batch=rows_per_step, drop_last=args.dataloader_drop_last
        )
    if strategy == "group_by_length":
        epochs = grouped_by_length(lengths_of(dataset, args.length_column_name), rows_per_step, seed)
    else:
        epochs = sequential(n_rows) if strategy == "sequential" else shuffled(n_rows, seed)
    return StepOrder(
        epochs=epochs,
        n_rows=n_rows,
        rows_per_batch=rows_per_step // batches,
        batches_per_step=batches,
        drop_last=args.dataloader_drop_last,
    )


def _order_rule(args: TrainingArguments) -> str | None:
    """Return the rule's name with what it depends on; None for sequential rows, which every version reads alike."""
    parts = [] if args.train_sampling_strategy == "sequential" else ["as in transformers"]
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        parts.append(f"lengths of {args.length_column_name}")
    if args.gradient_accumulation_steps > 1:
        if args.dataloader_drop_last and args.train_sampling_strategy != "batch_rebalance":
            rows = args.train_rows_per_step // args.gradient_accumulation_steps
            parts.append(f"batches of {rows} rows, the last one left out")
        if args.train_sampling_strategy == "batch_rebalance":
            parts.append(f"{args.gradient_accumulation_steps} batches a step")
    return ", ".join(parts) or None


def _evaluations(args: TrainingArguments, n_steps: int, order: StepOrder) -> Interval:
    """Return when the run is evaluated: eval_delay counts what eval_strategy counts."""
    interval = _interval(args.eval_strategy, args.eval_steps or args.logging_steps, n_steps, order)
    unit = order.steps_per_epoch if args.eval_strategy == "epoch" else 1
    return replace(interval, begins=args.eval_delay * unit)


def _interval(strategy: str, steps: float, n_steps: int, order: StepOrder) -> Interval:
    if strategy == "epoch":
        return Interval(strategy, order.steps_per_epoch)
    if strategy == "steps":
        return Interval(strategy, math.ceil(steps * n_steps) if 0 < steps < 1 else int(steps))
    return Interval(strategy, 0)


class BatchLoader:
    """The micro-batches of each step of the plan. Any step can be read at any time; threads may read ahead."""

    def __init__(self, run: Run, collator: Any = None) -> None:
        """The generators of random numbers that `collator` keeps for itself are seeded before each batch."""
        args = run.args
        if args.ignore_data_skip:
            logger.info("ignore_data_skip changes nothing: a resumed run continues with the next row at no cost")
        self.micro_rows = args.per_device_train_batch_size
        """Most rows of a micro-batch on one rank; auto_find_batch_size lowers it before the first step."""
        self.n_left_out = 0
        """Steps of epochs that a callback ended early."""
        self._run, self._order = run, run.plan.order
        self._tokens_of: tuple[int, np.ndarray] = -1, np.zeros(1)
        """An epoch, and the tokens that it has left before each of its steps."""
        self._pinned = run.device.type == "cuda" and args.dataloader_pin_memory is not False
        if args.dataloader_pin_memory and not self._pinned:
            logger.warning(
                "dataloader_pin_memory has no effect: pinned memory speeds up copies to a GPU, and none is used"
            )
        self._draws = Draws(args.seed, collator)
        self._prefetcher = self._threads(args.dataloader_num_workers) if args.dataloader_num_workers else None

    def _threads(self, n_workers: int) -> Prefetcher:
        """Return the threads that prepare batches; raises ConfigError for a collator that draws random numbers."""
        from whet.data.prefetch import Prefetcher, Source, draws_in_threads

        if self._draws.own:
            raise draws_in_threads(n_workers)
        n_ahead = n_workers * (self._run.args.dataloader_prefetch_factor or PREFETCH_FACTOR)
        return Prefetcher(Source(pieces=self._pieces, make=self._make, end=self._end), n_workers, n_ahead)

    def take(self, plan_step: int) -> list[Batch]:
        """Return this rank's batches of this step."""
        if self._prefetcher is not None:
            return self._prefetcher.take(plan_step)
        batches = []
        for piece in self._pieces(plan_step):
            self._draws.begin(plan_step, piece[1])
            batches.append(self._make(*piece))
        return batches

    def rows(self, plan_step: int) -> np.ndarray:
        """Return the rows of this step, those of all ranks."""
        return self._order.rows(plan_step)

    def at_epoch(self, plan_step: int) -> bool:
        """Return whether this step is the first of an epoch: the one before it was the last of an epoch."""
        return plan_step % self._order.steps_per_epoch == 0

    def skip_epoch(self, plan_step: int) -> None:
        """Continue with the next epoch; the remaining steps of this one are left out."""
        self.n_left_out += -plan_step % self._order.steps_per_epoch

    def epochs_done(self, plan_step: int) -> float:
        """Return how many epochs are done before this step."""
        return self._order.epoch(plan_step)

    def tokens_ahead(self, plan_step: int) -> float | None:
        """Return the real tokens of the steps from this one on; None for rows whose length only reading them tells."""
        dataset, n_steps = self._run.train_dataset, self._run.plan.n_steps
        if not isinstance(dataset, RowStore):
            return None
        if plan_step >= n_steps:
            return 0.0
        epoch, within = divmod(plan_step, self._order.steps_per_epoch)
        if self._tokens_of[0] != epoch:
            rows = self._order.epochs(epoch)[: self._order.batches_per_epoch * self._order.rows_per_batch]
            begins = np.arange(0, len(rows), self._order.rows_per_batch * self._order.batches_per_step)
            sums = np.add.reduceat(dataset.lengths[rows], begins)
            self._tokens_of = epoch, np.concatenate([np.cumsum(sums[::-1])[::-1], [0]])
        left = self._tokens_of[1]
        ends, last = min(n_steps - epoch * self._order.steps_per_epoch, len(left) - 1), len(left) - 1
        more = max(n_steps - (epoch + 1) * self._order.steps_per_epoch, 0)  # other epochs have the same rows
        return float(left[within] - left[ends] + more * left[0] / last)

    def state(self) -> State:
        """Return what the step number does not say about the position in the data."""
        return {"n_left_out": self.n_left_out}

    def load_state(self, saved: State) -> None:
        """Restore what `state` returned."""
        schema.require_all(saved, {"n_left_out": schema.count}, "loader")
        self.n_left_out = saved["n_left_out"]

    def close(self) -> None:
        """End the threads and release the data."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _pieces(self, plan_step: int) -> list[Piece]:
        """Return the micro-batches of a step: rows, position of the first in the step, padded lengths."""
        return micro_batches_of(self._run, self._order.rows(plan_step), self.micro_rows)

    def _make(self, rows: np.ndarray, first_slot: int, padded_to: np.ndarray | None, is_extra: bool) -> Batch:
        batch = self._run.objective.batch(self._run.train_dataset, rows, first_slot, padded_to)
        batch = replace(batch, rows=rows, is_extra=is_extra)
        return batch.pinned() if self._pinned else batch

    def _end(self, plan_step: int) -> int:
        """Return the step at which reading ahead stops: the end of the epoch, or of the run."""
        n_steps, per_epoch = self._run.plan.n_steps, self._order.steps_per_epoch
        if self._run.args.dataloader_persistent_workers:
            return n_steps
        return min(n_steps, (plan_step // per_epoch + 1) * per_epoch)


def micro_batches_of(run: Run, rows: np.ndarray, micro_rows: int) -> list[Piece]:
    """Return this rank's micro-batches of a step: rows, position of the first in the step, padded lengths, is_extra.

    `rows` are those of all ranks, `micro_rows` the most of one rank. A micro-batch is cut into one share for each rank;
    a rank without rows computes the first one again, for nothing.
    """
    args, dataset, n_ranks, rank = run.args, run.train_dataset, run.place.n_ranks, run.place.rank
    budgeted = args.max_tokens_per_batch
    cuts = budget.cuts(dataset, rows, micro_rows * n_ranks, None if budgeted is None else budgeted * n_ranks)
    if n_ranks > 1:
        cuts = _shares_of_ranks(run, rows, cuts)
    lengths = budget.padded_to(dataset, rows, cuts, args.per_device_train_batch_size, run.objective.padding)
    return [_piece(rows, cuts[n], lengths[n], cuts[n - rank]) for n in range(rank, len(cuts), n_ranks)]


def _shares_of_ranks(run: Run, rows: np.ndarray, cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shares of all ranks in each micro-batch, in order: each of about as many tokens."""
    shares_of_all: list[tuple[int, int]] = []
    n_ranks, most = run.place.n_ranks, run.args.max_tokens_per_batch
    left = list(reversed(cuts))
    while left:
        first, last = left.pop()
        weights = budget.weights_of(run.train_dataset, rows[first:last], packed=run.objective.packed)
        shares = budget.shares(weights, n_ranks)
        if most and last - first > n_ranks and max(int(weights[a:b].sum()) for a, b in shares) > most:
            middle = (first + last) // 2  # the rows fit together, but not in shares of complete rows
            left += [(middle, last), (first, middle)]
            continue
        shares_of_all += [(first + start, first + end) for start, end in shares]
    return shares_of_all


def _piece(rows: np.ndarray, cut: tuple[int, int], padded_to: np.ndarray | None, of_first: tuple[int, int]) -> Piece:
    first, last = cut
    if first < last:
        return rows[first:last], first, padded_to, False
    again = of_first[0]
    return rows[again : again + 1], again, None, True
