"""What a run will do at which step, worked out before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whet.config.arguments import TrainingArguments
from whet.data.order import StepOrder


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The steps of a run. Each `*_every` is in steps; None: never."""

    order: StepOrder
    n_steps: int
    n_epochs: int
    log_every: int | None
    eval_every: int | None
    save_every: int | None

    def due(self, every: int | None, step: int) -> bool:
        """Return whether something that happens every so many steps happens after step `step` (counted from 1)."""
        return every is not None and step % every == 0


def make(args: TrainingArguments, n_rows: int) -> RunPlan:
    """Return the plan of a run over `n_rows` rows."""
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
        log_every=_every(args.logging_strategy, args.logging_steps, n_steps, order),
        eval_every=_every(args.eval_strategy, args.eval_steps or args.logging_steps, n_steps, order),
        save_every=_every(args.save_strategy, args.save_steps, n_steps, order),
    )


def _every(strategy: str, steps: float, n_steps: int, order: StepOrder) -> int | None:
    if strategy == "epoch":
        return order.steps_per_epoch
    if strategy == "steps":
        return math.ceil(steps * n_steps) if 0 < steps < 1 else int(steps)
    return None
