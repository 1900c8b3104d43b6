"""The Trainer: the same arguments as transformers' own, on whet's step, batches and checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput

from whet.config.arguments import TrainingArguments
from whet.config.ranks import require_one_process
from whet.config.translate import arguments_of
from whet.errors import ConfigError, DataError, StorageError
from whet.kernels import allocator
from whet.log import logger, set_level
from whet.methods import fuse, int8, order
from whet.models import objective as objectives
from whet.precision import formats, policy
from whet.train import best, evaluate, leave, probe, weights
from whet.train.callbacks import empty_cache, profile, progress, trackers
from whet.train.callbacks.events import Events
from whet.train.collate import default_collator
from whet.train.fit import Fit
from whet.train.meter import speed

_LABELS = ("labels", "label", *objectives.SPAN_LABELS)
Evaluation = Callable[["Trainer", Any], dict[str, float]]
"""Judges the trainer's model on a data set; returns metrics without a prefix."""


class Trainer:
    """Train any module that returns a loss; question answering models of known families train without padding.

    The arguments are those of transformers' Trainer. `evaluation` replaces the loss and `compute_metrics` with a
    judgement of the task's own; `padded_length` is what rows would be padded to elsewhere (only the log uses it).
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: objectives.Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        *,
        evaluation: Evaluation | None = None,
        padded_length: int | None = None,
    ) -> None:
        require_one_process()
        self.args = arguments_of(args)
        set_level(self.args.log_level)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.given_optimizers = optimizers
        self.optimizer, self.lr_scheduler = optimizers
        self.evaluation = evaluation
        self.clock = time.perf_counter
        """What times the precisions that `auto` compares."""
        self.model = order.restore(model).to(weights.device_of(self.args.use_cpu))
        formats.raise_to_float32(self.model)
        default = default_collator(processing_class, self.model)
        self.objective = objectives.choose(
            self.model, data_collator, default, padded_length, attn=self.args.attn_implementation
        )
        self.precision = policy.build(self.args, self.device)
        self._precision_before_training: policy.Precision | None = None
        if self.device.type == "cpu":
            allocator.keep_freed_memory()
        self._fuse()
        int8.require_fused(self.model, self.objective.packed_model, self.precision)
        order.save_memory(self.model, self.objective.packed_model, self.args)
        self.state = TrainerState(train_batch_size=self.args.per_device_train_batch_size)
        shown = progress.for_this_output(bar=not self.args.disable_tqdm)
        own = [*profile.build(self.args), shown, *trackers.build(self.args), *empty_cache.build(self.args, self.device)]
        self.events = Events(self.args, [*own, *(callbacks or ())], model=self.model)
        self.events.send("on_init_end", self.state)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train; return the last step, the mean loss and the run's figures (also written to the log history)."""
        require_one_process()
        if self.train_dataset is None or len(self.train_dataset) == 0:
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="pass train_dataset, or check --train_file",
            )
        with leave.watched(self.args):
            return Fit(self).run(resume_from_checkpoint or self.args.resume_from_checkpoint)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the metrics of the model on the data set (default: `eval_dataset`), each under `prefix_name`."""
        dataset = self._evaluation_set(eval_dataset)
        started_s = time.perf_counter()
        if self.evaluation is not None:
            metrics = self.evaluation(self, dataset)
        else:
            metrics = self._judge(dataset, keep_logits=self.compute_metrics is not None)[1]
        metrics |= speed("", time.perf_counter() - started_s, len(dataset), self._n_eval_batches(dataset))
        named = _prefixed(metrics, metric_key_prefix)
        self.log(named)
        self.events.send("on_evaluate", self.state, metrics=named)
        return named

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the model's predictions (rows, ...), the labels where there are any, and the metrics."""
        started_s = time.perf_counter()
        prediction, metrics = self._judge(test_dataset, keep_logits=True)
        assert prediction is not None
        metrics |= speed("", time.perf_counter() - started_s, len(test_dataset), self._n_eval_batches(test_dataset))
        named = _prefixed(metrics, metric_key_prefix)
        self.events.send("on_predict", self.state, metrics=named)
        return PredictionOutput(prediction.predictions, prediction.label_ids, named)

    def forward_batches(self, dataset: Any) -> Any:
        """Yield (batch, output) over the data set in order, without gradients; batches of the evaluation size."""
        n_rows = self.args.per_device_eval_batch_size
        return evaluate.forward_batches(self.model, self.objective, dataset, n_rows, self.evaluation_precision(dataset))

    def evaluation_precision(self, dataset: Any) -> policy.Precision:
        """Return the precision of an evaluation: the training's, or what `auto` finds the faster one before it."""
        if self.precision.name != "auto":
            return self.precision
        if self._precision_before_training is None and not probe.too_few(self, dataset):
            self._precision_before_training = probe.settle_evaluation(self, dataset)
        return self._precision_before_training or self.precision

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, configuration, tokenizer and training arguments, as files that transformers loads.

        Raises StorageError (exit 74) where the disk refuses.
        """
        folder = Path(output_dir or self.args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.write_model(folder)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                what=f"the model cannot be written to {folder}",
                got=str(error),
                why="a model counts only when all of it is on the disk",
                fix="free space there, or use another --output_dir",
            ) from error

    def write_model(self, folder: Path) -> None:
        """Write the files of `save_model` into a folder that is there; errors of the disk come through as they are."""
        weights.save_weights(self.model, folder)
        weights.save_processing(self.processing_class, folder)
        (folder / "training_args.json").write_text(policy.as_run(self.args, self.precision) + "\n", "utf-8")

    def save_state(self) -> None:
        """Write trainer_state.json: the counters and the log history, in transformers' form."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        text = json.dumps(best.as_saved(self.state), indent=2, sort_keys=True) + "\n"
        (Path(self.args.output_dir) / "trainer_state.json").write_text(text, "utf-8")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write {split}_results.json, and put the metrics into all_results.json."""
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            earlier = json.loads(path.read_text("utf-8")) if path.exists() else {}
            _write_json(path, earlier | dict(metrics))

    def close(self, failed: bool = False) -> None:
        """End the runs of the trackers, as failed ones where they know such; a later log would begin new ones."""
        for callback in self.events.callbacks:
            if isinstance(callback, trackers.Tracker):
                callback.close(failed)

    def log(self, logs: dict[str, float]) -> None:
        """Put figures into the log history and show them."""
        if self.state.epoch is not None:
            logs = logs | {"epoch": round(self.state.epoch, 4)}
        self.state.log_history.append(logs | {"step": self.state.global_step})
        self.events.send("on_log", self.state, logs=logs)

    def _fuse(self) -> None:
        """Put the fused operators in where they can serve, and say how batches will run."""
        name = getattr(getattr(self.model, "config", None), "model_type", type(self.model).__name__)
        if not isinstance(self.objective, objectives.PackedSpans):
            why = "whet does not know %s with this head and collator without padding"
            if self.args.attn_implementation in ("eager", "sdpa"):
                why = "attention that is not whet's does not know rows end to end (%s)"
            logger.info(f"batches run padded: {why}", name)
            return
        fused = fuse.apply(self.objective.model) if fuse.possible(self.objective.model) else "operators in plain torch"
        logger.info("batches run without padding (%s), %s", name, fused)

    def _evaluation_set(self, given: Any) -> Any:
        dataset = self.eval_dataset if given is None else given
        if dataset is None:
            raise ConfigError(
                what="there is no data set to evaluate on",
                why="evaluation was asked for",
                fix="pass eval_dataset, or --validation_file; or use --eval_strategy no",
            )
        return dataset

    def _judge(self, dataset: Any, *, keep_logits: bool) -> tuple[EvalPrediction | None, dict[str, float]]:
        """Return predictions (where kept) and metrics: the mean loss over targets, and what compute_metrics says."""
        kept: list[tuple[Any, ...]] = []
        labels: list[tuple[Any, ...]] = []
        loss_sum, n_targets = 0.0, 0
        for batch, output in self.forward_batches(dataset):
            if _has_labels(batch):
                loss_sum += float(self.objective.loss_sum(output, batch))
                n_targets += self.objective.count(batch)
                labels.append(tuple(label.cpu().numpy() for label in _labels_of(batch)))
            if keep_logits:
                kept.append(self.objective.logits(output, batch))
        metrics = {"loss": loss_sum / n_targets} if n_targets else {}
        if not keep_logits:
            return None, metrics
        stacked: Any = evaluate.stack(labels) if labels else None  # transformers gives None too
        prediction = EvalPrediction(evaluate.stack(kept), stacked)
        if self.compute_metrics is not None and labels:
            metrics |= dict(self.compute_metrics(prediction))
        return prediction, metrics

    def _n_eval_batches(self, dataset: Any) -> int:
        return -(-len(dataset) // self.args.per_device_eval_batch_size)


def _prefixed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics under `prefix_name`; those that carry the prefix already keep their names."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def _labels_of(batch: Any) -> list[Any]:
    found = dict(batch.labels) or {name: batch.inputs[name] for name in _LABELS if name in batch.inputs}
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def _has_labels(batch: Any) -> bool:
    return bool(_labels_of(batch))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    told = {name: _json_number(value) for name, value in values.items()}
    path.write_text(json.dumps(told, indent=4, sort_keys=True) + "\n", "utf-8")


def _json_number(value: Any) -> Any:
    """Return the value; NaN and the infinities, which JSON does not have, as text."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
