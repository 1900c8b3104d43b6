"""The smallest changes of a run's settings with which it fits into memory, those that cost the least first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.sharing import stage_of_run
from whet.engine.forecast import Forecast
from whet.errors import ConfigError, WhetError
from whet.plan import choose

Settings = tuple[Any, TrainingArguments]
"""The task's and the training's."""
Forecasting = Callable[[Any, TrainingArguments], Forecast]


@dataclass(frozen=True)
class Change:
    """Settings with which a run needs less memory."""

    flags: str
    """As typed on the command line."""
    cost: str
    """What it costs, in words."""
    settings: Settings
    same_result: bool = True
    """Whether the weights that come out are the same, to rounding."""
    is_split: bool = False
    """Whether it splits steps into smaller micro-batches."""


@dataclass(frozen=True)
class Outcome:
    """A change, or several together, and the forecast with it."""

    changes: tuple[Change, ...]
    forecast: Forecast

    @property
    def flags(self) -> str:
        """All flags of its changes."""
        return " ".join(change.flags for change in self.changes)

    @property
    def same_result(self) -> bool:
        """Whether the weights that come out are the same, to rounding."""
        return all(change.same_result for change in self.changes)


def changes(job: Any, args: TrainingArguments, forecast: Forecast) -> Iterator[Change]:
    """Yield what makes this run smaller, the cheapest first: what costs time, then what changes the result."""
    yield from _splits(job, args, forecast)
    if args.precision in ("auto", "fp32"):
        for own in _with(args, precision="bf16", bf16=None):
            yield Change("--precision bf16", "rounding", (job, own), same_result=False)
    if not args.gradient_checkpointing:
        for policy, cost in (
            ("selective", "what lies between products is computed twice"),
            ("blocks", "blocks are computed twice"),
        ):
            for own in _with(args, gradient_checkpointing=True, checkpointing_policy=policy):
                yield Change(f"--gradient_checkpointing true --checkpointing_policy {policy}", cost, (job, own))
    if args.world_size > 1 and not stage_of_run(args) and args.deepspeed is None:
        for stage, shared in enumerate(
            ("the optimizer's state", "state and gradients", "state, gradients, weights"), 1
        ):
            for own in _with(args, zero_stage=stage):
                yield Change(f"--zero_stage {stage}", f"ranks share {shared}", (job, own))
    alone = job.lora_r is None and args.world_size == 1
    if alone and not args.optimizer_in_backward and not args.zero_stage:
        flags, same = "--optimizer_in_backward true --max_grad_norm 0", args.max_grad_norm == 0
        for own in _with(args, optimizer_in_backward=True, max_grad_norm=0.0):
            yield Change(flags, "no clipping", (job, own), same_result=same)
    if args.optim not in ("adamw_whet_8bit", "adafactor"):
        for optim, cost in (("adamw_whet_8bit", "states of 8 bits"), ("adafactor", "another rule of the update")):
            for own in _with(args, optim=optim):
                yield Change(f"--optim {optim}", cost, (job, own), same_result=False)
    half = forecast.anatomy.layers // 2
    if args.freeze_layers is None and half:
        for own in _with(args, freeze_layers=half):
            yield Change(f"--freeze_layers {half}", "half of the layers do not learn", (job, own), same_result=False)
    if job.lora_r is None:
        yield Change("--lora_r 8", "adapters learn, not the weights", (replace(job, lora_r=8), args), same_result=False)


def _splits(job: Any, args: TrainingArguments, forecast: Forecast) -> Iterator[Change]:
    """Yield the ways to have the rows of a step in smaller micro-batches, the largest of these first."""
    same = not choose.fixed_split(args) and forecast.anatomy.packed  # padded batches draw other dropout
    most = args.per_device_train_batch_size
    of_step = most * args.gradient_accumulation_steps
    for rows in (n for n in range(most - 1, 0, -1) if of_step % n == 0):
        batches = of_step // rows
        flags = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {batches}"
        for own in _with(args, per_device_train_batch_size=rows, gradient_accumulation_steps=batches):
            yield Change(flags, "smaller products", (job, own), same_result=same, is_split=True)


def that_fit(
    job: Any, args: TrainingArguments, free_bytes: int, first: Forecast, forecast: Forecasting
) -> list[Outcome]:
    """Return the changes that fit into so much memory alone; if none does, the first that do together.

    Of splits into smaller micro-batches, the largest that fits is enough. `first` is the forecast without a change.
    """

    def fits(change: Change) -> Outcome | None:
        outcome = _outcome((change,), forecast)
        return outcome if outcome is not None and outcome.forecast.memory.with_free(free_bytes).fits else None

    every = [*changes(job, args, first)]
    split = _first([one for one in every if one.is_split], fits)
    others = [outcome for one in every if not one.is_split and (outcome := fits(one)) is not None]
    fitting = [*([] if split is None else [split]), *others]
    return fitting or _together(job, args, free_bytes, first, forecast)


def _first(falling: Sequence[Change], fits: Callable[[Change], Outcome | None]) -> Outcome | None:
    """Return the first of these changes, which need less and less memory, that fits; few are looked at."""
    found, low, high = None, 0, len(falling)
    while low < high:
        at = (low + high) // 2
        if (outcome := fits(falling[at])) is None:
            low = at + 1
        else:
            found, high = outcome, at
    return found


def _together(
    job: Any, args: TrainingArguments, free_bytes: int, first: Forecast, forecast: Forecasting
) -> list[Outcome]:
    """Return the first changes that fit together, each made on top of those before; none, if all together do not."""
    taken: list[Change] = []
    best = first
    while True:
        made = (_outcome(_added(taken, change), forecast) for change in changes(job, args, best))
        smaller = next((one for one in made if one is not None and _is_smaller(one, best)), None)
        if smaller is None:
            return []
        taken, best = list(smaller.changes), smaller.forecast
        job, args = taken[-1].settings
        if best.memory.with_free(free_bytes).fits:
            return [smaller]


def _added(taken: Sequence[Change], change: Change) -> list[Change]:
    """Return the changes with one more; a further split of the steps replaces an earlier one."""
    return [*(one for one in taken if not (one.is_split and change.is_split)), change]


def _is_smaller(outcome: Outcome, than: Forecast) -> bool:
    return outcome.forecast.memory.peak_bytes < 0.98 * than.memory.peak_bytes


def _outcome(made: Sequence[Change], forecast: Forecasting) -> Outcome | None:
    """Return the forecast with these changes; None if they do not go with the run."""
    try:
        return Outcome(tuple(made), forecast(*made[-1].settings))
    except WhetError:
        return None


def _with(args: TrainingArguments, **changed: Any) -> Iterator[TrainingArguments]:
    """Yield the settings with these changes, unless they do not go with the others."""
    with suppress(ConfigError):
        yield replace(args, **changed)
