"""Evaluation: forward passes without gradients, and the loss, predictions and metrics from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput

from whet.data.batch import Batch
from whet.objectives.base import IGNORED, Objective
from whet.objectives.packed_head import PackedHead
from whet.objectives.span import SPAN_LABELS
from whet.precision.policy import Precision
from whet.train.compat import constructor, eval_prediction, overrides
from whet.train.compat.dataloaders import WhetLoader, is_sized
from whet.train.compat.eval_prediction import Extras
from whet.train.compat.public import PublicTrainer
from whet.train.control import stop
from whet.train.sync import OneRank, Sync

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

    @property
    def loss(self) -> dict[str, Any]:
        """The mean loss over targets and those of its parts, as metrics; nothing if there were no labels."""
        sums = {"loss": self.loss_sum, **self.part_sums}
        return {name: total / self.n_targets for name, total in sums.items()} if self.n_targets else {}


def forward_batches(
    model: nn.Module, objective: Objective, dataset: Any, n_rows: int, precision: Precision, sync: Sync | None = None
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch of `n_rows` rows in order, with the model's output; the model's mode is restored after."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        for source, rows in _row_batches(dataset, n_rows):
            batch = objective.batch(source, rows, 0).to(device)
            with torch.no_grad(), precision.forward():
                output = objective.forward(batch, seed=0, step=0)
            yield batch, output
            stop.check((sync or OneRank()).stop_signal)
    finally:
        model.train(was_training)


def run(trainer: PublicTrainer, loader: Any, *, keep: bool, ignore_keys: Sequence[str] | None) -> EvalLoopOutput:
    """Return the result of an evaluation of the loader's batches; metrics have no prefix.

    If whet made the loader, its rows are read directly, so that batches can run without padding.
    """
    trainer.events.eval_dataloader = loader
    by_user = trainer.user_loss or overrides.changed(trainer, "prediction_step")
    extras = Extras(trainer.model, trainer.args.include_for_metrics, constructor.pad_token_id(trainer))
    if isinstance(loader, WhetLoader) and not by_user:
        with _logits_if(trainer.objective, wanted=keep):
            found = _of_rows(trainer, loader.dataset, extras, keep=keep, ignore_keys=ignore_keys)
        concat = trainer.args.eval_do_concat_batches
        predictions, labels = (
            eval_prediction.joined(part, concat=concat) for part in (found.predictions, found.labels)
        )
    else:
        found, predictions, labels = _of_batches(trainer, loader, extras, keep=keep, ignore_keys=ignore_keys)
    given = extras.joined(concat=trainer.args.eval_do_concat_batches)
    metrics = found.loss | eval_prediction.judged(trainer.compute_metrics, predictions, labels, given)
    return EvalLoopOutput(predictions, labels, metrics, found.n_rows)


@contextmanager
def _logits_if(objective: Objective, *, wanted: bool) -> Iterator[None]:
    """Let a head of masked words leave the (N, V) logits of unlabelled tokens out where nobody reads them."""
    if not isinstance(objective, PackedHead):
        yield
        return
    objective.needs_logits = wanted
    try:
        yield
    finally:
        objective.needs_logits = True


def _of_rows(
    trainer: PublicTrainer, dataset: Any, extras: Extras, *, keep: bool, ignore_keys: Sequence[str] | None
) -> Totals:
    """Run whet's own batches of a data set."""
    found, objective = Totals(keep), trainer.objective
    for batch, output in trainer.forward_batches(dataset):
        labels, loss = _labels_of(batch, trainer.args.label_names), None
        if labels:
            loss_sum, n_targets = float(objective.loss_sum(output, batch)), objective.count(batch)
            loss = loss_sum / max(n_targets, 1)
            found.loss_sum += loss_sum
            found.n_targets += n_targets
            for name, part in objective.loss_parts(output, batch).items():
                found.part_sums[name] = found.part_sums.get(name, 0.0) + float(part)
            found.labels.append(tuple(label.cpu().numpy() for label in labels))
        if keep:
            logits = objective.logits(_without(output, ignore_keys), batch)
            found.predictions.append(_preprocessed(trainer, logits, labels))
        extras.add(batch, loss, batch.n_rows)
        found.n_rows += batch.n_rows
    return found


def _of_batches(
    trainer: PublicTrainer, loader: Any, extras: Extras, *, keep: bool, ignore_keys: Sequence[str] | None
) -> tuple[Totals, Any, Any]:
    """Run the batches of any loader through `prediction_step`; return also predictions and labels."""
    concat = trainer.args.eval_do_concat_batches
    kept, kept_labels = (EvalLoopContainer(concat, padding_index=IGNORED) for _ in range(2))
    found, model = Totals(keep), trainer.model
    was_training = model.training
    model.eval()
    try:
        for inputs in loader:
            n_rows = find_batch_size(inputs) or 0
            n_targets = _n_targets(inputs, n_rows)
            options = overrides.accepted(trainer.prediction_step, ignore_keys=ignore_keys)
            loss, logits, labels = trainer.prediction_step(model, inputs, not keep, **options)
            if loss is not None:
                found.loss_sum += float(loss.mean()) * n_targets
                found.n_targets += n_targets
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            for container, tensors in ((kept, logits), (kept_labels, labels)):
                if tensors is not None:
                    container.add(tensors)
                    container.to_cpu_and_numpy()
            extras.add(inputs, None if loss is None else float(loss.mean()), n_rows)
            found.n_rows += n_rows
            trainer.events.send("on_prediction_step", trainer.state)
            stop.check(trainer.sync.stop_signal)
    finally:
        model.train(was_training)
    return found, kept.get_arrays(), kept_labels.get_arrays()


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


def _without(output: Any, ignore_keys: Sequence[str] | None) -> Any:
    """Return a model's output without the ignored entries."""
    if not ignore_keys or not isinstance(output, Mapping):
        return output
    kept = {name: value for name, value in output.items() if name not in ignore_keys}
    return type(output)(**kept) if hasattr(output, "to_tuple") else kept


def _n_targets(inputs: Any, n_rows: int) -> int:
    """Return the number of targets in a batch's mean loss: token labels other than -100, or else its rows."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point() and labels.dim() > 1:
        return int((labels != IGNORED).sum())
    return n_rows


def _labels_of(batch: Batch, named: Sequence[str] | None) -> list[Any]:
    """Return the batch's labels: the named columns, or else those with the usual names."""
    given = {**batch.inputs, **batch.labels}
    found = given if named is not None or not batch.labels else dict(batch.labels)
    found = {name: found[name] for name in (_LABELS if named is None else named) if name in found}
    return [value for value in found.values() if isinstance(value, torch.Tensor)]
