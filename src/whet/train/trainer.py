"""The engine of whet's commands: it trains, evaluates and predicts with whet's step, batches and checkpoints."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from whet.config.arguments import TrainingArguments
from whet.config.ranks import here, require_output_for_restarts, restarted
from whet.errors import ConfigError, DataError
from whet.objectives.base import Collate, Objective
from whet.precision import policy
from whet.train import evaluate, setup
from whet.train.callbacks import announce, empty_cache, profile, progress, trackers, trainjob
from whet.train.callbacks.events import Events
from whet.train.callbacks.first_gradients import FirstGradients
from whet.train.checkpoint import best, weights
from whet.train.compat import constructor, dataloaders, special_tokens
from whet.train.compat.collate import default_collator
from whet.train.control import determinism, earlier_runs
from whet.train.control.safe_points import guarded
from whet.train.few_samples import weight_average
from whet.train.loop import TrainingLoop
from whet.train.many_ranks import sync_of
from whet.train.meter import speed
from whet.train.output import files as output_files
from whet.train.output import hub, printing, results, run_log
from whet.train.resume import other_ranks, restore
from whet.train.run import new_counters
from whet.train.sharding import unfinished
from whet.train.sync import Sync
from whet.train.trials import precision as precision_trial

Evaluation = Callable[["Trainer", Any], dict[str, float]]
"""Evaluates the trainer's model on a data set; returns metrics without a prefix."""


class Trainer:
    """Train any module that returns a loss; models of known families and heads train without padding.

    `whet.Trainer` is for scripts: it is transformers' own. `evaluation` replaces the loss and `compute_metrics` of an
    evaluation. `padded_length` is the length that rows would be padded to without packing; None: that of the longest
    row in their batch (for the log, and for `padding_in_loss`).
    """

    model: nn.Module
    objective: Objective
    precision: policy.Precision
    collate: Collate
    """Makes padded batches, without the columns that the model does not read."""
    clock: Any
    """The clock that times the precisions which `auto` compares."""
    sync: Sync
    """Makes the ranks of a run agree."""
    model_with_new_layers: weakref.ref[nn.Module] | None = None
    """The model that has got the new weights of `reinit_layers`."""
    why_precision = ""
    """The precision of the run in words, with what was measured; empty until it is chosen."""
    auto_as_in = ""
    """Which earlier run chose the precision in `args`, by `auto`; empty: none did."""

    @run_log.buffered()
    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        evaluation: Evaluation | None = None,
        padded_length: int | None = None,
    ) -> None:
        self.args = TrainingArguments() if args is None else args
        printing.configure(self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.collator_given = data_collator is not None
        self.data_collator = default_collator(processing_class) if data_collator is None else data_collator
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = self.given_optimizers = optimizers
        self.evaluation, self.padded_length = evaluation, padded_length
        self.clock, self.sync = time.perf_counter, sync_of(self.args)
        self.evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        """Puts the weights that are evaluated into the model for a block: their mean, while a training averages."""
        self.before_steps: Callable[[], None] = _nothing  # called in a training, with the weights before its steps
        self.announcer = announce.Announcer(self)
        self._precision_before_training: policy.Precision | None = None
        constructor.require_consistent(self)
        setup.use_model(self, model)
        self.state = new_counters(self.args, self.sync.place)
        own = [*_default_callbacks(self.args, self.device), self.announcer, FirstGradients(self), *(callbacks or ())]
        self.events = Events(self.args, own, model=self.model, processing_class=self.processing_class)
        self.events.optimizer, self.events.lr_scheduler = optimizers
        self.events.send("on_init_end", self.state)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @determinism.honoured
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train; return the last step, the mean loss and the run's figures (also written to the log history)."""
        self._require_joined()
        unfinished.require_whole(self.model)
        if dataloaders.is_empty(self.train_dataset):
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="pass train_dataset, or check --train_file",
            )
        constructor.require_evaluation_set(self)
        special_tokens.align(self.model, self.processing_class)
        earlier_runs.free(self.model)
        try:
            with guarded(self.args):
                asked = resume_from_checkpoint or self.args.resume_from_checkpoint or self._after_restart()
                folder = restore.agreed_folder(asked, Path(self.args.output_dir), self.sync)
                if folder is not None:
                    self.args = self.events.args = other_ranks.with_step_of(folder, self.args, self.sync.n_ranks)
                return TrainingLoop(self).train(folder)
        finally:
            self.evaluated_weights = nullcontext

    @determinism.honoured
    @weight_average.honoured
    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the metrics of the model on the data set (default: `eval_dataset`), each under `prefix_name`."""
        unfinished.require_whole(self.model)
        started_s = time.perf_counter()
        dataset = constructor.evaluation_set(self, eval_dataset)
        if self.evaluation is not None:
            self._require_joined_results()
            metrics, n_rows = self.evaluation(self, dataset), len(dataset)
        else:
            keep = self.compute_metrics is not None and not self.args.prediction_loss_only
            output = evaluate.run(self, dataset, keep=keep)
            metrics, n_rows = output.metrics or {}, output.num_samples or 0
        metrics |= speed("", time.perf_counter() - started_s, n_rows, self._n_eval_batches(n_rows))
        named = results.prefixed(metrics, metric_key_prefix)
        self.log(named)
        self.events.send("on_evaluate", self.state, metrics=named)
        return named

    @determinism.honoured
    @weight_average.honoured
    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the model's predictions (rows, ...), the labels if there are any, and the metrics."""
        unfinished.require_whole(self.model)
        started_s = time.perf_counter()
        output: EvalLoopOutput = evaluate.run(self, test_dataset, keep=not self.args.prediction_loss_only)
        metrics, n_rows = output.metrics or {}, output.num_samples or 0
        metrics |= speed("", time.perf_counter() - started_s, n_rows, self._n_eval_batches(n_rows))
        named = results.prefixed(metrics, metric_key_prefix)
        self.events.send("on_predict", self.state, metrics=named)
        return PredictionOutput(output.predictions, output.label_ids, named)

    def forward_batches(self, dataset: Any) -> Any:
        """Yield (batch, output) over the data set in order, without gradients; batches of the evaluation size."""
        n_rows, precision = self.args.per_device_eval_batch_size, self.evaluation_precision(dataset)
        self.announcer.announce_evaluation(dataset)
        batches = evaluate.forward_batches(self.model, self.objective, dataset, n_rows, precision, self.sync)
        n_done, total = 0, len(dataset) if dataloaders.is_sized(dataset) else None
        for batch, output in batches:
            yield batch, output
            n_done = min(n_done + batch.n_rows * self.sync.n_ranks, total or n_done + batch.n_rows)
            self.events.send("on_prediction_step", self.state, n_done=n_done, n_rows=total)

    def evaluation_precision(self, dataset: Any) -> policy.Precision:
        """Return the precision of an evaluation: that of the training, or before one the faster by measurement."""
        if self.precision.name != "auto":
            return self.precision
        subject = precision_trial.TrialModel.of(self)
        if precision_trial.too_few_batches(subject, dataset):
            self.why_precision = self.why_precision or "fp32 (auto: too few batches to measure)"
        elif self._precision_before_training is None:
            self._precision_before_training = precision_trial.choose_evaluation_precision(subject, dataset)
        return self._precision_before_training or self.precision

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, configuration, tokenizer and training arguments, as files that transformers loads.

        Raises StorageError (exit 74) if writing fails.
        """
        output_files.write_model(Path(output_dir or self.args.output_dir), self.write_model)

    def write_model(self, folder: Path) -> None:
        """Write the files of `save_model` to an existing folder; errors of the disk are not translated."""
        unfinished.require_whole(self.model)
        by_collator = getattr(self.data_collator, "tokenizer", None)
        processing = by_collator if self.processing_class is None else self.processing_class
        weights.save_processing(processing, folder, taken={*weights.FILES, "training_args.json"})
        weights.save_weights(self.model, folder)
        (folder / "training_args.json").write_text(policy.as_run(self.args, self.precision) + "\n", "utf-8")

    def close(self, failed: bool = False) -> None:
        """End the runs of the trackers, as failed if they support that; a later log entry would start new ones."""
        for callback in self.events.callbacks:
            if isinstance(callback, trackers.Tracker):
                callback.close(failed)

    def log(self, logs: dict[str, float]) -> None:
        """Add figures to the log history and show them, with the epoch."""
        if self.state.epoch is not None:
            logs["epoch"] = round(self.state.epoch, 4)
        self.state.log_history.append(logs | {"step": self.state.global_step})
        run_log.write(
            ["  ".join(f"{name} {value}" for name, value in ({"step": self.state.global_step} | logs).items())]
        )
        self.events.send("on_log", self.state, logs=logs)

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write {split}_results.json, and add the metrics to all_results.json."""
        results.save(self.args.output_dir, split, metrics, on_error=self.args.save_error_policy)

    def save_state(self) -> None:
        """Write trainer_state.json: the counters and the log history, in transformers' form."""
        path = Path(self.args.output_dir) / "trainer_state.json"
        output_files.write_json(path, best.as_saved(self.state), indent=2, on_error=self.args.save_error_policy)

    def create_model_card(self, **facts: Any) -> None:
        """Write a draft of a model card, README.md, into the output folder; `facts` are those of transformers' card."""
        if self.args.should_save:
            hub.write_card(self, facts)

    def _after_restart(self) -> str | None:
        """Return "auto" in a program that its launcher started again."""
        require_output_for_restarts(overwrites=self.args.overwrite_output_dir)
        return "auto" if restarted() else None

    def _require_joined_results(self) -> None:
        if self.sync.n_ranks > 1 and not getattr(self.evaluation, "joins_ranks", False):
            raise ConfigError(
                what="evaluation= does not go with several ranks",
                got=type(self.evaluation).__name__,
                why="each rank computes its own batches, and this evaluation would see those of one rank alone",
                fix="use compute_metrics, which gets the predictions of all ranks; or join what the ranks found with "
                "trainer.sync.in_order, and give the evaluation an attribute joins_ranks = True",
            )

    def _require_joined(self) -> None:
        place = here()
        if place.n_ranks != self.sync.n_ranks:
            raise ConfigError(
                what="the ranks of this process appeared after its Trainer was made",
                got=f"{place.n_ranks} ranks now, {self.sync.n_ranks} then",
                why="a Trainer joins the others when it is made",
                fix="call init_process_group, and set the variables of a launcher, before Trainer(...)",
            )

    def _n_eval_batches(self, n_rows: int) -> int:
        return -(-n_rows // self.args.per_device_eval_batch_size)


def _nothing() -> None:
    pass


def _default_callbacks(args: TrainingArguments, device: torch.device) -> list[Any]:
    """Return the callbacks that show and record the run."""
    if not here().is_first:  # rank 0 shows and records for all
        return empty_cache.build(args, device)
    shown = progress.for_this_output(bar=not args.disable_tqdm, form=args.log_format)
    return [*profile.build(args), shown, *trackers.build(args), *trainjob.build(), *empty_cache.build(args, device)]
