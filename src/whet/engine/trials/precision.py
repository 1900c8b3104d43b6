"""Chooses the precision of a run by timing passes of the model before its first step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from whet.data import budget
from whet.data.batch import Batch
from whet.engine.run import Prepared
from whet.engine.step import ObjectiveGradients
from whet.kernels.embedding import RowGradient
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.models.fused.layers import GRADIENT
from whet.models.packed import trial_of_graphs
from whet.precision import compare, policy
from whet.precision.device import has_bf16
from whet.precision.policy import Precision
from whet.store import weights

_EVALUATION_ROUNDS = 3
_FEWEST_BATCHES = 6
"""With fewer batches, timing takes longer than the faster format saves in an evaluation."""


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
        fp32 = "fp32 out of memory" if math.isinf(self.times.fp32_s) else f"fp32 {self.times.fp32_s:.3g} s"
        seconds = f"{fp32}, {self.other} {self.times.other_s:.3g} s"
        least = f", least of {self.times.n_rounds}" if self.times.n_rounds > 1 else ""
        return f"{self.passes} of {self.n_tokens} tokens: {seconds}{least}"


class PrecisionChoice:
    """The precision of an engine's passes, and why it is that: asked for by name, or chosen by `auto` by measurement.

    Timed passes change nothing.
    """

    def __init__(self, asked: Precision) -> None:
        self.current = asked
        """Named "auto" until a training has chosen."""
        self.why = ""
        """The precision in words, with what was measured; empty until it is chosen."""
        self.clock: Callable[[], float] = time.perf_counter
        """Times the formats that `auto` compares."""
        self._auto_as_in = ""
        self._of_evaluations: Precision | None = None

    def chosen_in(self, run: str) -> None:
        """Note which earlier run chose the precision that is asked for, by `auto`; empty: none did."""
        self._auto_as_in = run

    @property
    def name(self) -> str:
        """The name of the current precision."""
        return self.current.name

    def for_training(self, prepared: Prepared, rows: np.ndarray, kept: str | None) -> Precision:
        """Choose the precision of a training run, with a state of its own: the one asked for, or that of `auto`.

        `kept` is the precision of the checkpoint to resume from, which `auto` uses without measuring. `rows` are those
        of the next step; passes over the first of them are timed. A format that was asked for by name is timed on a
        CPU, which may emulate it: the log warns if it is slower than fp32.
        """
        name, cpu = self.current.name, prepared.device.type == "cpu"
        if name == "auto" and kept is not None:
            name, self.why = kept, f"{kept} (auto: as in the checkpoint)"
            logger.info("precision auto: %s, as in the checkpoint", kept)
        elif name == "auto":
            name = self._measured(
                prepared, partial(self.time_steps, prepared, rows, "bf16"), compare.FORWARD_AND_BACKWARD
            )
        elif self._auto_as_in:
            self.why = f"{name} (auto: as in {self._auto_as_in})"
        elif prepared.args.precision != "auto":
            self.why = f"{name} (asked for)"
            if name != "fp32" and kept is None and cpu and (timing := self.time_steps(prepared, rows, name)):
                self._log_comparison(name, timing)
        self.current = policy.make(prepared.sync.precision(name), prepared.device)
        return self.current

    def for_evaluation(self, prepared: Prepared, dataset: Any) -> Precision:
        """Return the precision of an evaluation: that of the training, or before one the faster by measurement."""
        if self.current.name != "auto":
            return self.current
        if len(dataset) < _FEWEST_BATCHES * prepared.args.per_device_eval_batch_size:
            self.why = self.why or "fp32 (auto: too few batches to measure)"
        elif self._of_evaluations is None:
            timed = partial(self._time_forward, prepared, dataset)
            name = prepared.sync.precision(self._measured(prepared, timed, compare.FORWARD))
            self._of_evaluations = policy.make(name, prepared.device)
        return self._of_evaluations or self.current

    def log_compile_speed(self, prepared: Prepared, rows: np.ndarray) -> None:
        """Time passes with and without torch.compile on a CPU, and log how they compare; compiled blocks stay."""
        if prepared.device.type != "cpu" or not prepared.args.torch_compile:
            return
        from whet.methods import compile_blocks

        with preserving_state(prepared.model):
            batch = _training_batch(prepared, rows)
            run = partial(Passes(prepared, [batch]).run, self.current)

            def plain() -> None:
                with compile_blocks.off(prepared.model):
                    run()

            run()  # which compiles
            times = compare.alternate(plain, run, self.clock, prepared.device)
        slower = times.speedup < 1.0
        text = "torch.compile runs at %.2f times the speed of plain code here (%.3g s and %.3g s for %d tokens)%s"
        advice = "; leave --torch_compile out" if slower else ""
        figures = (times.speedup, times.other_s, times.fp32_s, batch.n_computed or batch.n_rows, advice)
        logger.log(logging.WARNING if slower else logging.INFO, text, *figures)

    def time_steps(self, prepared: Prepared, rows: np.ndarray, other: str) -> Timing | None:
        """Time passes over the first of these rows in fp32 and in the other format; None if products are too small."""
        if not are_worth_timing(prepared.model):
            return None
        rows = _first_micro_batch(prepared, rows)

        def timed(n_rows: int, *, fp32: bool) -> Timing:
            with preserving_state(prepared.model):
                passes = Passes(prepared, [_batch(prepared, prepared.train_dataset, rows[:n_rows])])
                times = self._alternate(prepared, passes.run, other, compare.N_ROUNDS, fp32=fp32)
            return Timing(other, passes.n_computed, times)

        return compare.with_rows_that_fit(len(rows), timed)  # auto_find_batch_size looks later for what fits

    def _time_forward(self, prepared: Prepared, dataset: Any) -> Timing | None:
        """Time forward passes over the first rows in fp32 and in bf16; None if products are too small."""
        if not compare.is_worth_timing(weights.count_without_embeddings(prepared.model), compare.FORWARD):
            return None

        def timed(n_rows: int, *, fp32: bool) -> Timing:
            with preserving_state(prepared.model), torch.no_grad():
                prepared.model.eval()
                batch = _batch(prepared, dataset, range(n_rows))

                def run(precision: Precision) -> None:
                    with precision.forward():
                        prepared.objective.forward(batch, seed=0, step=0)

                times = self._alternate(prepared, run, "bf16", _EVALUATION_ROUNDS, fp32=fp32)
            return Timing("bf16", batch.n_computed or batch.n_rows, times, "forward")

        return compare.with_rows_that_fit(prepared.args.per_device_eval_batch_size, timed)

    def _alternate(
        self, prepared: Prepared, run: Callable[[Precision], None], other: str, n_rounds: int, *, fp32: bool
    ) -> compare.Times:
        """Return how long a pass takes in fp32, if it is asked for, and in the other format."""
        names = ["fp32", other] if fp32 else [other]
        passes = {name: partial(run, policy.make(name, prepared.device)) for name in names}
        if prepared.args.torch_compile:  # which the timings leave out
            for one in passes.values():
                one()
        return compare.alternate(passes.get("fp32"), passes[other], self.clock, prepared.device, n_rounds=n_rounds)

    def _measured(self, prepared: Prepared, timed: Callable[[], Timing | None], passes: float) -> str:
        """Return the precision that `auto` chooses, and log the reason."""
        if not has_bf16(prepared.device):
            self.why = "fp32 (auto: this GPU has no bf16)"
            logger.info("precision auto: fp32; this GPU has no bf16")
            return "fp32"
        timing = timed()
        if timing is None:
            text = "precision auto: fp32; %d tokens are %.2g GFLOP of products, too few for a format to gain (below %g)"
            flop = compare.flop(weights.count_without_embeddings(prepared.model), passes)
            logger.info(text, compare.TIMED_TOKENS, flop / 1e9, compare.LEAST_FLOP / 1e9)
            self.why = "fp32 (auto: model too small for bf16 to gain)"
            return "fp32"
        chosen = timing.times.chosen
        logger.info("precision auto: %s; %s (%s)", chosen, timing.times.in_words, timing)
        lost = f"; auto asks for {compare.MARGIN:g}x" if chosen == "fp32" else ""
        self.why = f"{chosen} (auto: {timing.times.in_short}){lost}"
        return chosen

    def _log_comparison(self, name: str, timing: Timing) -> None:
        """Record the speed of the format that was asked for; log a warning if it is slower than fp32."""
        self.why = f"{name} (asked for: measured {timing.times.speedup:.2f}x fp32 here)"
        if timing.times.speedup < 1.0:
            text = (
                "--%s is slower than fp32 here: a pass takes %.2f times as long (%s); --precision auto would take fp32"
            )
            logger.warning(text, name, 1.0 / timing.times.speedup, timing)


def are_worth_timing(model: nn.Module) -> bool:
    """Return whether a training of this model times two formats: its products are large enough to gain by one."""
    return compare.is_worth_timing(weights.count_without_embeddings(model))


def timed_passes(prepared: Prepared, rows: np.ndarray) -> Passes:
    """Return the passes that a training times before its first step, whose rows these are."""
    return Passes(prepared, [_training_batch(prepared, rows)])


def _training_batch(prepared: Prepared, rows: np.ndarray) -> Batch:
    """Return the first micro-batch of these rows of the training set, or its first rows, on the model's device."""
    return _batch(prepared, prepared.train_dataset, _first_micro_batch(prepared, rows))


def _first_micro_batch(prepared: Prepared, rows: np.ndarray) -> np.ndarray:
    args = prepared.args
    found = budget.cuts(prepared.train_dataset, rows, args.per_device_train_batch_size, args.max_tokens_per_batch)
    return rows[: found[0][1]]


def _batch(prepared: Prepared, dataset: Any, rows: Sequence[int] | np.ndarray) -> Batch:
    """Return a batch of the rows that a timed pass computes."""
    batch = prepared.objective.batch(dataset, rows, 0)
    n_timed = compare.n_timed_rows(len(rows), batch.n_computed, prepared.device)
    if n_timed < len(rows):
        batch = prepared.objective.batch(dataset, rows[:n_timed], 0)
    return batch.to(prepared.device)


class Passes(nn.Module):
    """Runs steps on stand-in parameters, which share the weights' memory but neither their .grad nor their hooks."""

    def __init__(self, prepared: Prepared, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.model = prepared.model
        self.objective, self.batches, self.seed = prepared.objective, batches, prepared.args.seed
        trained = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        self._weights = {name: nn.Parameter(weight.detach()) for name, weight in trained.items()}
        self._copies = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        stand_in = {id(weight): self._weights[name] for name, weight in trained.items()}
        tables = [part for part in self.modules() if hasattr(part, GRADIENT) and id(part.weight) in stand_in]
        self._tables = [(table, RowGradient(stand_in[id(table.weight)])) for table in tables]

    @property
    def n_computed(self) -> int:
        """Tokens of a pass, or its rows if they hold no tokens."""
        return sum(batch.n_computed or batch.n_rows for batch in self.batches)

    @property
    def tables(self) -> Sequence[Tensor]:
        """Those of the stand-ins whose gradients are in memory that steps use again."""
        return [gradient.table for _, gradient in self._tables]

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The stand-ins that get a gradient."""
        return [*self._weights.values()]

    def run(self, precision: Precision) -> None:
        """Run one pass."""
        with self._table_gradients():
            functional_call(self, self._weights | self._copies, (precision,))
        for weight in self._weights.values():
            weight.grad = None

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


@contextmanager
def preserving_state(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in training mode; restore modes and random number generators after it.

    CUDA graphs that it made go, since they belong to stand-ins for the weights.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with generators_kept(), trial_of_graphs(model):
            model.train()
            yield
    finally:
        for module, training in modes:
            module.training = training
