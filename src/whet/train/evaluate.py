"""Evaluation: forward passes without gradients, and the loss, predictions and metrics from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers.trainer_utils import EvalLoopOutput

from whet.data.batch import Batch
from whet.dist.messages import anything
from whet.errors import ConfigError
from whet.objectives.base import Objective
from whet.objectives.distilled import Distilled
from whet.objectives.packed_head import PackedHead
from whet.objectives.padded_tokens import PaddedNextTokens
from whet.objectives.span import SPAN_LABELS
from whet.precision.policy import Precision
from whet.train.compat import constructor, eval_prediction
from whet.train.compat.dataloaders import is_sized
from whet.train.compat.eval_prediction import Extras
from whet.train.compat.public import PublicTrainer
from whet.train.control import stop
from whet.train.resume import schema
from whet.train.sync import OneRank, Sync

T = TypeVar("T")
_LABELS = ("labels", "label", *SPAN_LABELS)


@dataclass
class Totals:
    """The sums and predictions of an evaluation so far."""

    keep: bool
    """Whether predictions are kept."""
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
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        for source, rows in _own(_row_batches(dataset, n_rows), sync or OneRank()):
            batch = objective.batch(source, rows, 0).to(device)
            with torch.no_grad(), precision.forward():
                output = objective.forward(batch, seed=0, step=0)
            yield batch, output
    finally:
        model.train(was_training)


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


def run(trainer: PublicTrainer, dataset: Any, *, keep: bool) -> EvalLoopOutput:
    """Return the result of an evaluation of the rows of a data set; metrics have no prefix."""
    args = trainer.args
    extras = Extras(trainer.model, args.include_for_metrics, constructor.pad_token_id(trainer))
    with _logits_if(trainer.objective, wanted=keep):
        found = _of_rows(trainer, dataset, extras, keep=keep)
    concat = args.eval_do_concat_batches
    predictions, labels = (eval_prediction.joined(part, concat=concat) for part in (found.predictions, found.labels))
    given = extras.joined(concat=concat)
    metrics = found.loss | eval_prediction.judged(trainer.compute_metrics, predictions, labels, given)
    return EvalLoopOutput(predictions, labels, metrics, found.n_rows)


@contextmanager
def _logits_if(objective: Objective, *, wanted: bool) -> Iterator[None]:
    """Let a head of masked words leave the (N, V) logits of unlabelled tokens out where nobody reads them."""
    if not isinstance(objective, PackedHead | PaddedNextTokens | Distilled):
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
    extras: Any = None
    """What `compute_metrics` gets besides predictions and labels."""
    mean_loss: float | None = None


def _in_order(sync: Sync, own: Sequence[_Result]) -> list[_Result]:
    """Return the results of all ranks, as one rank has them."""
    return [_Result(**one) for one in sync.in_order([vars(one) for one in own], _is_result)]


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
    "mean_loss": schema.optional(_is_float),
    "part_sums": schema.object_of(_is_float),
    "extras": schema.optional(lambda value: isinstance(value, np.ndarray)),
    "predictions": anything,
    "labels": anything,
}
"""The fields of a `_Result` that came from another rank."""


def _of_rows(trainer: PublicTrainer, dataset: Any, extras: Extras, *, keep: bool) -> Totals:
    """Run whet's own batches of a data set."""
    found = Totals(keep)
    own = [_result(trainer, batch, output, extras, keep=keep) for batch, output in trainer.forward_batches(dataset)]
    for result in _in_order(trainer.sync, own):
        found.add(result)
        extras.take(result.extras, result.mean_loss, result.n_rows)
        if result.labels is not None:
            found.labels.append(result.labels)
        if keep:
            found.predictions.append(result.predictions)
    return found


def _result(trainer: PublicTrainer, batch: Batch, output: Any, extras: Extras, *, keep: bool) -> _Result:
    objective, labels = trainer.objective, _labels_of(batch, trainer.args.label_names)
    found = _Result(batch.n_rows, extras=extras.of(batch))
    if labels:
        loss_sum, n_targets = float(objective.loss_sum(output, batch)), objective.count(batch)
        found = replace(
            found,
            n_targets=n_targets,
            loss_sum=loss_sum,
            mean_loss=loss_sum / max(n_targets, 1),
            part_sums={name: float(part) for name, part in objective.loss_parts(output, batch).items()},
            labels=tuple(label.cpu().numpy() for label in labels),
        )
    if keep:
        found = replace(found, predictions=_preprocessed(trainer, objective.logits(output, batch), labels))
    return found


def _row_batches(dataset: Any, n_rows: int) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield (rows, indices) of each batch in order; a data set without a length is read as a stream."""
    if is_sized(dataset):
        for first in range(0, len(dataset), n_rows):
            yield dataset, range(first, min(first + n_rows, len(dataset)))
        return
    yield from ((rows, range(len(rows))) for rows in _chunks(dataset, n_rows))


def _chunks(rows: Iterable[Any], n_rows: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == n_rows:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _preprocessed(
    trainer: PublicTrainer, logits: tuple[np.ndarray, ...], labels: Sequence[Any]
) -> tuple[np.ndarray, ...]:
    """Return what `preprocess_logits_for_metrics` returns for a batch's predictions."""
    if trainer.preprocess_logits_for_metrics is None:
        return logits
    tensors = tuple(torch.from_numpy(array) for array in logits)
    made = trainer.preprocess_logits_for_metrics(_single(tensors), _single(tuple(labels)) if labels else None)
    made = tuple(made) if isinstance(made, tuple | list) else (made,)
    return tuple(one.detach().cpu().numpy() if isinstance(one, torch.Tensor) else np.asarray(one) for one in made)


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _labels_of(batch: Batch, named: Sequence[str] | None) -> list[Any]:
    """Return the batch's labels: the named columns, or else those with the usual names."""
    given = {**batch.inputs, **batch.labels}
    found = given if named is not None or not batch.labels else dict(batch.labels)
    found = {name: found[name] for name in (_LABELS if named is None else named) if name in found}
    return [value for value in found.values() if isinstance(value, torch.Tensor)]
