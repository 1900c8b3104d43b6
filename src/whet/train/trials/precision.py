"""Times passes of the user's model before training, to choose its precision. The passes change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from whet.config.arguments import TrainingArguments
from whet.data.batch import Batch
from whet.kernels.embedding import RowGradient
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.methods.compiling import method as compiling
from whet.models.fused.embeddings import GRADIENT
from whet.objectives.base import Objective
from whet.precision import compare, policy
from whet.precision.device import has_bf16
from whet.precision.policy import Precision
from whet.train.checkpoint import weights
from whet.train.compat.dataloaders import is_sized
from whet.train.compat.public import PublicTrainer
from whet.train.step import ObjectiveGradients
from whet.train.sync import Sync

_TOKENS = 512
"""Tokens of a pass, about: enough for products at full speed, few enough to take only seconds."""
_FORWARD, _FORWARD_AND_BACKWARD = 2.0, 6.0
"""Operations of the products for each weight and token, as transformers counts them."""
_EVALUATION_ROUNDS = 3
_FEWEST_BATCHES = 6
"""With fewer batches, timing takes longer than the faster format saves in an evaluation."""


@dataclass(frozen=True)
class TrialModel:
    """The model of a trial, and how it runs."""

    model: nn.Module
    objective: Objective
    args: TrainingArguments
    device: torch.device
    clock: Callable[[], float]
    sync: Sync
    precision: str
    """The name of the present precision; "auto" until a training run has chosen one."""
    explain: Callable[[str], None]
    """Takes the reason for the chosen precision, in words."""
    auto_as_in: str = ""
    """Which earlier run chose the precision of `args`, by `auto`; empty: it was asked for by name."""

    @classmethod
    def of(cls, trainer: PublicTrainer) -> TrialModel:
        """Return the subject that this Trainer trains."""
        own = (trainer.model, trainer.objective, trainer.args, trainer.device, trainer.clock, trainer.sync)

        def explain(why: str) -> None:
            trainer.why_precision = why

        return cls(*own, trainer.precision.name, explain, trainer.auto_as_in)


@dataclass(frozen=True)
class Timing:
    """The times of a pass in two formats."""

    other: str
    """The format that was compared with fp32."""
    n_tokens: int
    """Tokens of a pass, or its rows if they hold no tokens."""
    times: compare.Times
    passes: str = "forward + backward"

    def __str__(self) -> str:
        seconds = f"fp32 {self.times.fp32_s:.3g} s, {self.other} {self.times.other_s:.3g} s"
        least = f", least of {self.times.n_rounds}" if self.times.n_rounds > 1 else ""
        return f"{self.passes} of {self.n_tokens} tokens: {seconds}{least}"


def choose_precision(subject: TrialModel, dataset: Any, rows: np.ndarray | Batch, kept: str | None) -> Precision:
    """Return a fresh precision for a training run: the one asked for, or the one that `auto` chooses.

    `kept` is the precision of the checkpoint to resume from, which `auto` uses without measuring. `rows` are those of
    the next step; passes over the first of them are timed. A format that was asked for by name is timed on a CPU, which
    may emulate it: the log warns if it is slower than fp32.
    """
    name = subject.precision
    if name == "auto":
        timed = partial(measure, subject, dataset, rows, "bf16")
        name = _choose(subject, timed, _FORWARD_AND_BACKWARD) if kept is None else _as_in_checkpoint(subject, kept)
    elif subject.auto_as_in:
        subject.explain(f"{name} (auto: as in {subject.auto_as_in})")
    elif subject.args.precision != "auto":
        subject.explain(f"{name} (asked for)")
        if name != "fp32" and kept is None and subject.device.type == "cpu":
            _log_comparison(subject, name, measure(subject, dataset, rows, name))
    return policy.make(subject.sync.precision(name), subject.device)


def log_compile_speed(subject: TrialModel, dataset: Any, rows: np.ndarray | Batch, precision: Precision) -> None:
    """Time passes with and without torch.compile on a CPU, and log how they compare; compiled blocks stay."""
    if subject.device.type != "cpu" or not compiling.is_on(subject.model):
        return
    with preserving_state(subject.model):
        batch = _training_batch(subject, dataset, rows)
        run = partial(Passes(subject, [batch]).run, precision)

        def plain() -> None:
            with compiling.off(subject.model):
                run()

        _compile(subject, run)
        times = compare.alternate(plain, run, subject.clock)
    slower = times.speedup < 1.0
    text = "torch.compile runs at %.2f times the speed of plain code here (%.3g s and %.3g s for %d tokens)%s"
    advice = "; leave --torch_compile out" if slower else ""
    figures = (times.speedup, times.other_s, times.fp32_s, batch.n_computed or batch.n_rows, advice)
    logger.log(logging.WARNING if slower else logging.INFO, text, *figures)


def measure(subject: TrialModel, dataset: Any, rows: np.ndarray | Batch, other: str) -> Timing | None:
    """Time passes over the first of these rows in fp32 and in the other format; None if products are too small."""
    if _flop(subject) < compare.LEAST_FLOP:
        return None
    with preserving_state(subject.model):
        batch = _training_batch(subject, dataset, rows)
        passes = Passes(subject, [batch])
        fp32, half = (partial(passes.run, policy.make(name, subject.device)) for name in ("fp32", other))
        _compile(subject, fp32, half)
        return Timing(other, batch.n_computed or batch.n_rows, compare.alternate(fp32, half, subject.clock))


def _compile(subject: TrialModel, *passes: Callable[[], None]) -> None:
    """Run each pass once if blocks are compiled, so that the timings do not include compilation."""
    if compiling.is_on(subject.model):
        for one in passes:
            one()


def _flop(subject: TrialModel, passes: float = _FORWARD_AND_BACKWARD) -> float:
    """Return the operations in the products of _TOKENS tokens."""
    return passes * weights.count_without_embeddings(subject.model) * _TOKENS


def _as_in_checkpoint(subject: TrialModel, kept: str) -> str:
    subject.explain(f"{kept} (auto: as in the checkpoint)")
    logger.info("precision auto: %s, as in the checkpoint", kept)
    return kept


def too_few_batches(subject: TrialModel, dataset: Any) -> bool:
    """Return whether an evaluation of this data set takes less time than timing its formats."""
    return not is_sized(dataset) or len(dataset) < _FEWEST_BATCHES * subject.args.per_device_eval_batch_size


def choose_evaluation_precision(subject: TrialModel, dataset: Any) -> Precision:
    """Return the precision that `auto` chooses for an evaluation before any training, by timed forward passes."""
    timed = partial(measure_evaluation, subject, dataset, range(subject.args.per_device_eval_batch_size))
    return policy.make(subject.sync.precision(_choose(subject, timed, _FORWARD)), subject.device)


def measure_evaluation(subject: TrialModel, dataset: Any, rows: range) -> Timing | None:
    """Time forward passes over the first of these rows in fp32 and in bf16; None if products are too small."""
    if _flop(subject, _FORWARD) < compare.LEAST_FLOP:
        return None
    with preserving_state(subject.model), torch.no_grad():
        subject.model.eval()
        batch = _batch(subject, dataset, rows)

        def run(precision: Precision) -> None:
            with precision.forward():
                subject.objective.forward(batch, seed=0, step=0)
            _synchronize(subject.device)

        fp32, half = (partial(run, policy.make(name, subject.device)) for name in ("fp32", "bf16"))
        _compile(subject, fp32, half)
        times = compare.alternate(fp32, half, subject.clock, n_rounds=_EVALUATION_ROUNDS)
    return Timing("bf16", batch.n_computed or batch.n_rows, times, "forward")


def _choose(subject: TrialModel, timed: Callable[[], Timing | None], flop: float) -> str:
    """Return the precision that `auto` chooses, and log the reason."""
    if not has_bf16(subject.device):
        subject.explain("fp32 (auto: this GPU has no bf16)")
        logger.info("precision auto: fp32; this GPU has no bf16")
        return "fp32"
    timing = timed()
    if timing is None:
        text = "precision auto: fp32; %d tokens are %.2g GFLOP of products, too few for a format to gain (below %g)"
        logger.info(text, _TOKENS, _flop(subject, flop) / 1e9, compare.LEAST_FLOP / 1e9)
        subject.explain("fp32 (auto: model too small for bf16 to gain)")
        return "fp32"
    speedup = timing.times.speedup
    chosen = "bf16" if speedup >= compare.MARGIN else "fp32"
    text = "precision auto: %s; bf16 runs at %.2f times the speed of fp32, and %.2f are asked for (%s)"
    logger.info(text, chosen, speedup, compare.MARGIN, timing)
    lost = f"; auto asks for {compare.MARGIN:g}x" if chosen == "fp32" else ""
    subject.explain(f"{chosen} (auto: bf16 measured {speedup:.2f}x fp32 here){lost}")
    return chosen


def _log_comparison(subject: TrialModel, name: str, timing: Timing | None) -> None:
    """Record the speed of the format that was asked for; log a warning if it is slower than fp32."""
    if timing is None:
        return
    subject.explain(f"{name} (asked for: measured {timing.times.speedup:.2f}x fp32 here)")
    if timing.times.speedup >= 1.0:
        return
    text = "--%s is slower than fp32 here: a pass takes %.2f times as long (%s); --precision auto would take fp32"
    logger.warning(text, name, 1.0 / timing.times.speedup, timing)


def _training_batch(subject: TrialModel, dataset: Any, rows: np.ndarray | Batch) -> Batch:
    """Return a batch of the first of these rows of the training set, on the model's device."""
    if isinstance(rows, Batch):
        return rows.to(subject.device)
    return _batch(subject, dataset, rows[: subject.args.per_device_train_batch_size])


def _batch(subject: TrialModel, dataset: Any, rows: Sequence[int] | np.ndarray) -> Batch:
    """Return the first of the rows as a batch of about _TOKENS tokens."""
    batch = subject.objective.batch(dataset, rows, 0)
    if batch.n_computed > _TOKENS and len(rows) > 1:
        fewer = max(1, len(rows) * _TOKENS // batch.n_computed)
        batch = subject.objective.batch(dataset, rows[:fewer], 0)
    return batch.to(subject.device)


class Passes(nn.Module):
    """Runs steps on stand-in parameters, which share the weights' memory but neither their .grad nor their hooks."""

    def __init__(self, subject: TrialModel, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.model = subject.model
        self.objective, self.batches, self.seed = subject.objective, batches, subject.args.seed
        trained = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        self._weights = {name: nn.Parameter(weight.detach()) for name, weight in trained.items()}
        self._copies = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        stand_in = {id(weight): self._weights[name] for name, weight in trained.items()}
        tables = [part for part in self.modules() if hasattr(part, GRADIENT) and id(part.weight) in stand_in]
        self._tables = [(table, RowGradient(stand_in[id(table.weight)])) for table in tables]

    def run(self, precision: Precision) -> None:
        """Run one pass, and wait until the device has finished it."""
        with self._table_gradients():
            functional_call(self, self._weights | self._copies, (precision,))
        for weight in self._weights.values():
            weight.grad = None
        _synchronize(next(iter(self._weights.values())).device)

    def forward(self, precision: Precision) -> None:
        # The backward pass runs in here too: recomputed blocks must use the stand-ins as well.
        ObjectiveGradients(objective=self.objective, precision=precision, seed=self.seed)(self.batches, step=0)

    @contextmanager
    def _table_gradients(self) -> Iterator[None]:
        """Replace the gradients that embedding tables reuse between steps by others, for the stand-ins."""
        own = [getattr(table, GRADIENT) for table, _ in self._tables]
        try:
            for table, gradient in self._tables:
                setattr(table, GRADIENT, gradient)
            yield
        finally:
            for (table, _), gradient in zip(self._tables, own, strict=True):
                setattr(table, GRADIENT, gradient)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def preserving_state(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in training mode; restore modes and random number generators after it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with generators_kept():
            model.train()
            yield
    finally:
        for module, training in modes:
            module.training = training
