"""Timed passes of the user's own model before training: they choose its precision and leave no trace."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from whet.data.batch import Batch
from whet.kernels.layers.embedding import RowGradient
from whet.log import logger
from whet.methods.compiling import method as compiling
from whet.models.fused.embeddings import GRADIENT
from whet.precision import compare, policy
from whet.precision.device import has_bf16
from whet.precision.policy import Precision
from whet.train import step
from whet.train.checkpoint import weights
from whet.train.compat.dataloaders import is_sized

if TYPE_CHECKING:
    from whet.train.trainer import Trainer

_TOKENS = 512
"""Tokens of a pass, about: enough for products at full speed, few enough for seconds."""
_FORWARD, _FORWARD_AND_BACKWARD = 2.0, 6.0
"""Operations of the products, a weight and token, as transformers counts them."""
_EVALUATION_ROUNDS = 3
_PAYS = 6
"""Batches of an evaluation below which timing takes longer than the faster format saves."""


@dataclass(frozen=True)
class Probe:
    """What was timed, and how long it took."""

    other: str
    """The format beside fp32."""
    n_tokens: int
    """Token places of a pass, or its rows where they hold no tokens."""
    times: compare.Times
    passes: str = "forward + backward"

    def __str__(self) -> str:
        seconds = f"fp32 {self.times.fp32_s:.3g} s, {self.other} {self.times.other_s:.3g} s"
        medians = f", medians of {self.times.n_rounds}" if self.times.n_rounds > 1 else ""
        return f"{self.passes} of {self.n_tokens} tokens: {seconds}{medians}"


def settle(trainer: Trainer, rows: np.ndarray | Batch, kept: str | None) -> Precision:
    """Return the precision of a training run, fresh: what was asked for, or what `auto` comes to.

    `kept` is the precision of the checkpoint to go on from, which `auto` takes without measuring. `rows` are those of
    the run's next step; the first of them are what is measured. What was asked for by name is measured on a CPU, where
    it may be emulated: the log warns where it is slower than fp32.
    """
    name = trainer.precision.name
    if name == "auto":
        timed = partial(measure, trainer, rows, "bf16")
        name = _chosen(trainer, timed, _FORWARD_AND_BACKWARD) if kept is None else _taken(trainer, kept)
    elif trainer.args.precision != "auto":
        trainer.why_precision = f"{name} (asked for)"
        if name != "fp32" and kept is None and trainer.device.type == "cpu":
            _compare(trainer, name, measure(trainer, rows, name))
    return policy.make(name, trainer.device)


def tell_compiled(trainer: Trainer, rows: np.ndarray | Batch) -> None:
    """Time passes with compiled and with plain blocks on a CPU, and say how they compare; compiled ones stay."""
    if trainer.device.type != "cpu" or not compiling.is_on(trainer.model):
        return
    with no_trace(trainer.model, trainer.device):
        batch = _training_batch(trainer, rows)
        run = partial(Passes(trainer, [batch]).run, trainer.precision)

        def plain() -> None:
            with compiling.off(trainer.model):
                run()

        _compile(trainer, run)
        times = compare.alternate(plain, run, trainer.clock)
    slower = times.speedup < 1.0
    text = "torch.compile runs at %.2f times the speed of plain code here (%.3g s and %.3g s for %d tokens)%s"
    advice = "; leave --torch_compile out" if slower else ""
    figures = (times.speedup, times.other_s, times.fp32_s, batch.n_computed or batch.n_rows, advice)
    logger.log(logging.WARNING if slower else logging.INFO, text, *figures)


def measure(trainer: Trainer, rows: np.ndarray | Batch, other: str) -> Probe | None:
    """Time passes over the first of these rows in fp32 and in the other format; None where products are too small."""
    if _flop(trainer) < compare.LEAST_FLOP:
        return None
    with no_trace(trainer.model, trainer.device):
        batch = _training_batch(trainer, rows)
        passes = Passes(trainer, [batch])
        fp32, half = (partial(passes.run, policy.make(name, trainer.device)) for name in ("fp32", other))
        _compile(trainer, fp32, half)
        return Probe(other, batch.n_computed or batch.n_rows, compare.alternate(fp32, half, trainer.clock))


def _compile(trainer: Trainer, *passes: Callable[[], None]) -> None:
    """Run each of the passes once where blocks are compiled: to make a graph takes longer than many passes."""
    if compiling.is_on(trainer.model):
        for one in passes:
            one()


def _flop(trainer: Trainer, passes: float = _FORWARD_AND_BACKWARD) -> float:
    """Return the operations in the products of _TOKENS tokens."""
    return passes * weights.count_without_embeddings(trainer.model) * _TOKENS


def _taken(trainer: Trainer, kept: str) -> str:
    trainer.why_precision = f"{kept} (auto: as in the checkpoint)"
    logger.info("precision auto: %s, as in the checkpoint", kept)
    return kept


def too_few(trainer: Trainer, dataset: Any) -> bool:
    """Return whether an evaluation of this data set is over before timing its formats would pay."""
    return not is_sized(dataset) or len(dataset) < _PAYS * trainer.args.per_device_eval_batch_size


def settle_evaluation(trainer: Trainer, dataset: Any) -> Precision:
    """Return the precision of an evaluation before any training, where `auto` is to choose: by timed forward passes."""
    timed = partial(measure_evaluation, trainer, dataset, range(trainer.args.per_device_eval_batch_size))
    return policy.make(_chosen(trainer, timed, _FORWARD), trainer.device)


def measure_evaluation(trainer: Trainer, dataset: Any, rows: range) -> Probe | None:
    """Time forward passes over the first of these rows in fp32 and in bf16; None where products are too small."""
    if _flop(trainer, _FORWARD) < compare.LEAST_FLOP:
        return None
    with no_trace(trainer.model, trainer.device), torch.no_grad():
        trainer.model.eval()
        batch = _batch(trainer, dataset, rows)

        def run(precision: Precision) -> None:
            with precision.forward():
                trainer.objective.forward(batch, seed=0, step=0)
            _wait_for(trainer.device)

        fp32, half = (partial(run, policy.make(name, trainer.device)) for name in ("fp32", "bf16"))
        _compile(trainer, fp32, half)
        times = compare.alternate(fp32, half, trainer.clock, n_rounds=_EVALUATION_ROUNDS)
    return Probe("bf16", batch.n_computed or batch.n_rows, times, "forward")


def _chosen(trainer: Trainer, timed: Callable[[], Probe | None], flop: float) -> str:
    """Return what auto comes to; the log says it, and why."""
    if not has_bf16(trainer.device):
        trainer.why_precision = "fp32 (auto: this GPU has no bf16)"
        logger.info("precision auto: fp32; this GPU has no bf16")
        return "fp32"
    probe = timed()
    if probe is None:
        text = "precision auto: fp32; %d tokens are %.2g GFLOP of products, too few for a format to gain (below %g)"
        logger.info(text, _TOKENS, _flop(trainer, flop) / 1e9, compare.LEAST_FLOP / 1e9)
        trainer.why_precision = "fp32 (auto: model too small for bf16 to gain)"
        return "fp32"
    speedup = probe.times.speedup
    chosen = "bf16" if speedup >= compare.MARGIN else "fp32"
    text = "precision auto: %s; bf16 runs at %.2f times the speed of fp32, and %.2f are asked for (%s)"
    logger.info(text, chosen, speedup, compare.MARGIN, probe)
    lost = f"; auto asks for {compare.MARGIN:g}x" if chosen == "fp32" else ""
    trainer.why_precision = f"{chosen} (auto: bf16 measured {speedup:.2f}x fp32 here){lost}"
    return chosen


def _compare(trainer: Trainer, name: str, probe: Probe | None) -> None:
    """Note how fast the format that was asked for is; the log warns where it is slower than fp32."""
    if probe is None:
        return
    trainer.why_precision = f"{name} (asked for: measured {probe.times.speedup:.2f}x fp32 here)"
    if probe.times.speedup >= 1.0:
        return
    text = "--%s is slower than fp32 here: a pass takes %.2f times as long (%s); --precision auto would take fp32"
    logger.warning(text, name, 1.0 / probe.times.speedup, probe)


def _training_batch(trainer: Trainer, rows: np.ndarray | Batch) -> Batch:
    """Return the first of these rows of the training set as a batch, or the batch on the model's device."""
    if isinstance(rows, Batch):
        return rows.to(trainer.device)
    return _batch(trainer, trainer.train_dataset, rows[: trainer.args.per_device_train_batch_size])


def _batch(trainer: Trainer, dataset: Any, rows: Sequence[int] | np.ndarray) -> Batch:
    """Return the first of the rows as a batch of about _TOKENS tokens."""
    batch = trainer.objective.batch(dataset, rows, 0)
    if batch.n_computed > _TOKENS and len(rows) > 1:
        fewer = max(1, len(rows) * _TOKENS // batch.n_computed)
        batch = trainer.objective.batch(dataset, rows[:fewer], 0)
    return batch.to(trainer.device)


class Passes(nn.Module):
    """A step's gradients on stand-ins for the weights: they share their memory, but neither .grad nor hooks."""

    def __init__(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.model = trainer.model
        self.objective, self.batches, self.seed = trainer.objective, batches, trainer.args.seed
        trained = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        self._weights = {name: nn.Parameter(weight.detach()) for name, weight in trained.items()}
        self._copies = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        stand_in = {id(weight): self._weights[name] for name, weight in trained.items()}
        tables = [part for part in self.modules() if hasattr(part, GRADIENT) and id(part.weight) in stand_in]
        self._tables = [(table, RowGradient(stand_in[id(table.weight)])) for table in tables]

    def run(self, precision: Precision) -> None:
        """Run one pass, to its end on the device."""
        with self._table_gradients():
            functional_call(self, self._weights | self._copies, (precision,))
        for weight in self._weights.values():
            weight.grad = None
        _wait_for(next(iter(self._weights.values())).device)

    def forward(self, precision: Precision) -> None:
        # Backward runs in here too: what it computes again (checkpointing) must meet the stand-ins as well.
        step.gradients(self.objective, self.batches, precision, seed=self.seed, step=0)

    @contextmanager
    def _table_gradients(self) -> Iterator[None]:
        """Let embedding tables that keep their gradients between steps keep those of their stand-ins elsewhere."""
        own = [getattr(table, GRADIENT) for table, _ in self._tables]
        try:
            for table, gradient in self._tables:
                setattr(table, GRADIENT, gradient)
            yield
        finally:
            for (table, _), gradient in zip(self._tables, own, strict=True):
                setattr(table, GRADIENT, gradient)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block with the model in training mode; put back modes and random generators after it."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes:
            module.training = training
