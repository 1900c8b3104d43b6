"""Evaluation: forward passes without gradients, and the loss, predictions and metrics from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from whet.data.batch import Batch
from whet.engine.run import device_of
from whet.engine.sync import Sync
from whet.errors import ConfigError
from whet.objectives.base import IGNORED, Objective
from whet.objectives.span import SPAN_LABELS
from whet.precision.policy import Precision
from whet.store import schema
from whet.watch import stop

T = TypeVar("T")
_LABELS = ("labels", "label", *SPAN_LABELS)


@dataclass
class Totals:
    """The sums and predictions of an evaluation so far."""

    predictions: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    labels: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    """Sums of the named parts of the loss, such as the loss of a router of experts."""
    n_targets: int = 0
    n_rows: int = 0

    def add(self, result: _Result) -> None:
        """Count a batch."""
        self.n_rows += result.n_rows
        self.n_targets += result.n_targets
        self.loss_sum += result.loss_sum or 0.0
        for name, part in result.part_sums.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + part
        if result.labels is not None:
            self.labels.append(result.labels)
        if result.predictions is not None:
            self.predictions.append(result.predictions)

    @property
    def loss(self) -> dict[str, Any]:
        """The mean loss over targets and those of its parts, as metrics; nothing if there were no labels."""
        sums = {"loss": self.loss_sum, **self.part_sums}
        return {name: total / self.n_targets for name, total in sums.items()} if self.n_targets else {}


def forward_batches(
    model: nn.Module, objective: Objective, dataset: Any, n_rows: int, precision: Precision, sync: Sync | None = None
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch of `n_rows` rows in order, with the model's output; the model's mode is restored after.

    Of several ranks, each yields every n-th batch; `Sync.in_order` joins what they found.
    """
    device, was_training = device_of(model), model.training
    model.eval()
    try:
        for rows in _own(_in_batches(len(dataset), n_rows), sync or Sync()):
            batch = objective.batch(dataset, rows, 0).to(device)
            with torch.no_grad(), precision.forward():
                output = objective.forward(batch, seed=0, step=0)
            yield batch, output
    finally:
        model.train(was_training)


def _in_batches(n_rows: int, batch_size: int) -> Iterator[range]:
    """Yield the indices of each batch of the rows."""
    return (range(first, min(first + batch_size, n_rows)) for first in range(0, n_rows, batch_size))


def _own(batches: Iterable[T], sync: Sync) -> Iterator[T]:
    """Yield those of the batches that this rank computes; between rounds, stop for a signal."""
    number = -1
    for number, batch in enumerate(batches):
        if number % sync.n_ranks == sync.place.rank:
            yield batch
        if number % sync.n_ranks == sync.n_ranks - 1:
            stop.check(sync.stop_signal)
    if (number + 1) % sync.n_ranks:
        stop.check(sync.stop_signal)
    _require_same(sync, number + 1)


def _require_same(sync: Sync, n_batches: int) -> None:
    seen = sync.gather(n_batches, schema.count) if sync.n_ranks > 1 else [n_batches]
    if len(set(seen)) > 1:
        raise ConfigError(
            what="the ranks evaluate different data",
            got=f"{', '.join(map(str, seen))} batches",
            why="whet computes each batch on one rank, and takes the same batches to be read on all",
            fix="give evaluations data without split_dataset_by_node",
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation of the rows of a data set: which labels it reads, what it keeps, and who judges it."""

    objective: Objective
    sync: Sync
    keeps: bool
    """Whether predictions are kept."""
    label_names: Sequence[str] | None = None
    """The columns of the labels; None: those with the usual names."""
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None
    """Takes transformers' EvalPrediction, returns metrics."""
    preprocess_logits: Callable[..., Any] | None = None
    """Takes the logits and labels of a batch, returns the predictions that are kept."""

    def run(self, batches: Iterable[tuple[Batch, Any]]) -> EvalLoopOutput:
        """Return the result over this rank's batches and outputs, which are computed here; metrics have no prefix."""
        with _logits_if(self.objective, wanted=self.keeps):
            own = [self._result(batch, output) for batch, output in batches]
        totals = Totals()
        for result in self.sync.in_order([vars(one) for one in own], _is_result):
            totals.add(_Result(**result))
        predictions, labels = joined(totals.predictions), joined(totals.labels)
        metrics = totals.loss | judged(self.compute_metrics, predictions, labels)
        return EvalLoopOutput(predictions, labels, metrics, totals.n_rows)

    def _result(self, batch: Batch, output: Any) -> _Result:
        objective, labels = self.objective, self._labels_of(batch)
        found = _Result(batch.n_rows)
        if labels:
            found = replace(
                found,
                n_targets=objective.count(batch),
                loss_sum=float(objective.loss_sum(output, batch)),
                part_sums={name: float(part) for name, part in objective.loss_parts(output, batch).items()},
                labels=tuple(label.cpu().numpy() for label in labels),
            )
        if self.keeps:
            found = replace(found, predictions=self._preprocessed(objective.logits(output, batch), labels))
        return found

    def _labels_of(self, batch: Batch) -> list[Any]:
        """Return the batch's labels: the named columns, or else those with the usual names."""
        given = {**batch.inputs, **batch.labels}
        found = given if self.label_names is not None or not batch.labels else dict(batch.labels)
        names = _LABELS if self.label_names is None else self.label_names
        return [found[name] for name in names if isinstance(found.get(name), torch.Tensor)]

    def _preprocessed(self, logits: tuple[np.ndarray, ...], labels: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """Return what `preprocess_logits` returns for a batch's predictions."""
        if self.preprocess_logits is None:
            return logits
        tensors = tuple(torch.from_numpy(array) for array in logits)
        made = self.preprocess_logits(_single(tensors), _single(tuple(labels)) if labels else None)
        made = tuple(made) if isinstance(made, tuple | list) else (made,)
        return tuple(one.detach().cpu().numpy() if isinstance(one, torch.Tensor) else np.asarray(one) for one in made)


@contextmanager
def _logits_if(objective: Any, *, wanted: bool) -> Iterator[None]:
    """Let a head of masked words leave the (N, V) logits of unlabelled tokens out where nobody reads them."""
    if not hasattr(objective, "needs_logits"):
        yield
        return
    objective.needs_logits = wanted
    try:
        yield
    finally:
        objective.needs_logits = True


@dataclass(frozen=True)
class _Result:
    """What the evaluation of one batch found."""

    n_rows: int
    n_targets: int = 0
    loss_sum: float | None = None
    """Sum of the losses of its targets; None without labels."""
    part_sums: Mapping[str, float] = field(default_factory=dict)
    predictions: Any = None
    labels: Any = None


def _is_result(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.keys() == _KINDS.keys() and all(_KINDS[name](value[name]) for name in value)
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


_KINDS: dict[str, schema.Check] = {
    "n_rows": schema.count,
    "n_targets": schema.count,
    "loss_sum": schema.optional(_is_float),
    "part_sums": schema.object_of(_is_float),
    "predictions": schema.anything,
    "labels": schema.anything,
}
"""The fields of a `_Result` that came from another rank."""


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def joined(parts: Sequence[tuple[np.ndarray, ...]]) -> Any:
    """Return the batches' arrays as one array or a tuple of them; None without any, as in transformers."""
    columns = [_stacked(column) for column in zip(*parts, strict=True)]
    return None if not columns else columns[0] if len(columns) == 1 else tuple(columns)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenated arrays (rows, ...), the other dimensions padded with -100."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    widths = np.max([array.shape[1:] for array in arrays], axis=0)
    padded = []
    for array in arrays:
        missing = [(0, most - own) for own, most in zip(array.shape[1:], widths, strict=True)]
        padded.append(np.pad(array, [(0, 0), *missing], constant_values=IGNORED))
    return np.concatenate(padded)


def judged(metrics_of: Callable[..., Mapping[str, Any]] | None, predictions: Any, labels: Any) -> dict[str, Any]:
    """Return the metrics as plain numbers; empty if there are no predictions or labels."""
    if metrics_of is None or predictions is None or labels is None:
        return {}
    return denumpify_detensorize(dict(metrics_of(EvalPrediction(predictions, labels))))  # pyright: ignore[reportReturnType]
