"""The plan of a run: how many steps it takes, and when it logs, evaluates and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.data import sampling
from whet.data.lengths import lengths_of
from whet.data.order import StepOrder
from whet.errors import DataError


@dataclass(frozen=True)
class Interval:
    """How often the run logs, evaluates or saves."""

    strategy: str
    every: int
    """Steps between two times: those of an epoch for "epoch", 0 if the strategy has no fixed interval."""
    begins: float = 0.0
    """No time comes before this step."""

    def due(self, done: int, epoch_ends: bool) -> bool:
        """Return whether it is due after `done` steps."""
        if done < self.begins:
            return False
        return epoch_ends if self.strategy == "epoch" else self.every > 0 and done % self.every == 0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The steps of a run, and when it logs, evaluates and saves."""

    order: StepOrder
    order_rule: str | None
    """What the order of rows depends on, apart from the settings that a resume compares; None if nothing."""
    n_steps: int
    n_epochs: int
    log: Interval
    evaluate: Interval
    save: Interval


def make(args: TrainingArguments, dataset: Any) -> RunPlan:
    """Return the plan of a run over the data set; raises DataError if batches must be full and no batch is."""
    order = _order(args, dataset)
    if order.batches_per_epoch == 0:
        raise DataError(
            what="dataloader_drop_last leaves no rows to train on",
            got=f"{len(dataset)} rows, {order.rows_per_batch} in the smallest batch that is kept",
            why="it drops a batch that is not full, and no batch is full",
            fix="lower --per_device_train_batch_size, or leave --dataloader_drop_last out",
        )
    return from_order(args, order, n_steps_of(args, order.steps_per_epoch), _order_rule(args))


def n_steps_of(args: TrainingArguments, steps_per_epoch: int) -> int:
    """Return the length of a run over data of this size, in optimizer steps."""
    if args.max_steps > 0:
        return args.max_steps
    return max(math.ceil(args.num_train_epochs * steps_per_epoch), args.min_steps or 0)


def from_order(args: TrainingArguments, order: Any, n_steps: int, order_rule: str | None) -> RunPlan:
    """Return the plan of a run of `n_steps` steps over rows in this order."""
    return RunPlan(
        order=order,
        order_rule=order_rule,
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
        seed = sampling.REBALANCE_SEED if args.data_seed is None else seed
        if not args.dataloader_drop_last:
            n_rows = sampling.n_rebalanced(n_rows, rows_per_step, batches)
        epochs = sampling.rebalanced(lengths, rows_per_step, batches, seed)
        return StepOrder(
            epochs=epochs, n_rows=n_rows, rows_per_batch=rows_per_step, drop_last=args.dataloader_drop_last
        )
    if strategy == "group_by_length":
        epochs = sampling.grouped_by_length(lengths_of(dataset, args.length_column_name), rows_per_step, seed)
    else:
        epochs = sampling.sequential(n_rows) if strategy == "sequential" else sampling.shuffled(n_rows, seed)
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
            parts.append(f"batches of {args.per_device_train_batch_size} rows, the last one left out")
        if args.train_sampling_strategy == "batch_rebalance":
            parts.append(f"{args.gradient_accumulation_steps} batches a step")
    return ", ".join(parts) or None


def _evaluations(args: TrainingArguments, n_steps: int, order: Any) -> Interval:
    """Return when the run is evaluated: eval_delay counts what eval_strategy counts."""
    interval = _interval(args.eval_strategy, args.eval_steps or args.logging_steps, n_steps, order)
    unit = order.steps_per_epoch if args.eval_strategy == "epoch" else 1
    return replace(interval, begins=args.eval_delay * unit)


def _interval(strategy: str, steps: float, n_steps: int, order: Any) -> Interval:
    if strategy == "epoch":
        return Interval(strategy, order.steps_per_epoch)
    if strategy == "steps":
        return Interval(strategy, math.ceil(steps * n_steps) if 0 < steps < 1 else int(steps))
    return Interval(strategy, 0)
