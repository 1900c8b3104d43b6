"""What a run will do at which step, worked out before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whet.config.arguments import TrainingArguments
from whet.data.order import StepOrder
from whet.errors import DataError


@dataclass(frozen=True)
class Rhythm:
    """When something happens that has a strategy."""

    strategy: str
    every: int
    """Steps between two times; those of an epoch for "epoch", 0 where the strategy has no rhythm."""

    def due(self, done: int, epoch_ends: bool) -> bool:
        """Return whether it happens after `done` steps."""
        return epoch_ends if self.strategy == "epoch" else self.every > 0 and done % self.every == 0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The steps of a run, and when it logs, evaluates and saves."""

    order: StepOrder
    n_steps: int
    n_epochs: int
    log: Rhythm
    evaluate: Rhythm
    save: Rhythm


def make(args: TrainingArguments, n_rows: int) -> RunPlan:
    """Return the plan of a run over `n_rows` rows; raises DataError where they do not fill one step, and must."""
    if args.dataloader_drop_last and n_rows < args.train_rows_per_step:
        raise DataError(
            what="the training set does not fill one step",
            got=f"{n_rows} rows, {args.train_rows_per_step} a step",
            why="dataloader_drop_last leaves out a step with too few rows: nothing would be left",
            fix="lower --per_device_train_batch_size or --gradient_accumulation_steps, or drop no step",
        )
    order = StepOrder(
        n_rows=n_rows,
        rows_per_step=args.train_rows_per_step,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=args.train_sampling_strategy == "random",
        drop_last=args.dataloader_drop_last,
    )
    n_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * order.steps_per_epoch)
    return RunPlan(
        order=order,
        n_steps=n_steps,
        n_epochs=math.ceil(n_steps / order.steps_per_epoch),
        log=_rhythm(args.logging_strategy, args.logging_steps, n_steps, order),
        evaluate=_rhythm(args.eval_strategy, args.eval_steps or args.logging_steps, n_steps, order),
        save=_rhythm(args.save_strategy, args.save_steps, n_steps, order),
    )


def _rhythm(strategy: str, steps: float, n_steps: int, order: StepOrder) -> Rhythm:
    if strategy == "epoch":
        return Rhythm(strategy, order.steps_per_epoch)
    if strategy == "steps":
        return Rhythm(strategy, math.ceil(steps * n_steps) if 0 < steps < 1 else int(steps))
    return Rhythm(strategy, 0)
