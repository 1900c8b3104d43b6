"""The Trainer: the arguments and methods of transformers' Trainer, with whet's step, batches and checkpoints."""

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
from transformers import set_seed
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from whet.config.arguments import TrainingArguments
from whet.config.names.translate import Given
from whet.config.ranks import here, require_output_for_restarts, restarted
from whet.errors import ConfigError, DataError
from whet.objectives.base import Collate, Objective
from whet.precision import policy
from whet.train import evaluate, setup
from whet.train.callbacks import announce, empty_cache, profile, progress, trackers, trainjob
from whet.train.callbacks.events import Events
from whet.train.callbacks.first_gradients import FirstGradients
from whet.train.checkpoint import weights
from whet.train.compat import constructor, dataloaders, late_arguments, overrides, search, special_tokens
from whet.train.compat.accelerator import Accelerator
from whet.train.compat.collate import default_collator
from whet.train.compat.methods import TransformersMethods
from whet.train.control import determinism, earlier_runs
from whet.train.control.safe_points import guarded
from whet.train.few_samples import weight_average
from whet.train.loop import TrainingLoop
from whet.train.many_ranks import sync_of
from whet.train.meter import speed
from whet.train.output import files as output_files
from whet.train.output import printing, results, run_log
from whet.train.resume import other_ranks, restore
from whet.train.run import new_counters
from whet.train.sharding import unfinished
from whet.train.sync import Sync
from whet.train.trials import precision as precision_trial

Evaluation = Callable[["Trainer", Any], dict[str, float]]
"""Evaluates the trainer's model on a data set; returns metrics without a prefix."""


class Trainer(TransformersMethods):
    """Train any module that returns a loss; question answering models of known families train without padding.

    The arguments and methods are those of transformers' Trainer; a subclass may override what
    `docs/transformers.md` lists, and is refused for anything else. `evaluation` replaces the loss and `compute_metrics`
    of an evaluation. `padded_length` is the length that rows would be padded to without packing; None: that of the
    longest row in their batch (for the log, and for `padding_in_loss`).
    """

    model: nn.Module
    objective: Objective
    precision: policy.Precision
    collate: Collate
    """Makes padded batches, without the columns that the model does not read."""
    user_loss: bool
    """Whether the step goes through `training_step` and `compute_loss`, which users override."""
    label_names: list[str]
    label_smoother: LabelSmoother | None
    model_accepts_loss_kwargs: bool
    can_return_loss: bool
    search: search.Search | None
    trial: Any
    ignore_keys_for_eval: list[str] | None
    is_in_train = False
    clock: Any
    """The clock that times the precisions which `auto` compares."""
    sync: Sync
    """Makes the ranks of a run agree."""
    callbacks_args: TrainingArguments
    model_args: TrainingArguments
    """The arguments that the Trainer's callbacks and its model were prepared with."""
    model_with_new_layers: weakref.ref[nn.Module] | None = None
    """The model that has got the new weights of `reinit_layers`."""
    why_precision = ""
    """The precision of the run in words, with what was measured; empty until it is chosen."""
    auto_as_in = ""
    """Which earlier run chose the precision in `args`, by `auto`; empty: none did."""
    loss_shifts_labels: bool
    """Whether the loss compares each token with the label after it."""

    @run_log.buffered()
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        tokenizer: Any = None,
        evaluation: Evaluation | None = None,
        padded_length: int | None = None,
    ) -> None:
        overrides.require_honoured(self)
        self.given_args = Given(args)
        self.args = self.callbacks_args = self.given_args.translated
        printing.configure(self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = constructor.processing_class(processing_class, tokenizer)
        self.collator_given = data_collator is not None
        self.data_collator = default_collator(self.processing_class) if data_collator is None else data_collator
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.compute_loss_func, self.optimizer_cls_and_kwargs = compute_loss_func, optimizer_cls_and_kwargs
        self.optimizer, self.lr_scheduler = self.given_optimizers = optimizers
        self.made_optimizers: tuple[Any, Any] = (None, None)
        """The optimizer and the schedule that the last training made."""
        self.evaluation, self.padded_length = evaluation, padded_length
        self.clock, self.sync = time.perf_counter, sync_of(self.args)
        self.evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        """Puts the weights that are evaluated into the model for a block: their mean, while a training averages."""
        self.before_steps: Callable[[], None] = _nothing  # called in a training, with the weights before its steps
        self.model_init, self.announcer = model_init, announce.Announcer(self)
        self.search, self.trial, self.ignore_keys_for_eval = None, None, None
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._precision_before_training: policy.Precision | None = None
        self.accelerator = Accelerator(self)
        constructor.require_consistent(self, model)
        setup.use_model(self, self._new_model() if model is None else model)
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
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; return the last step, the mean loss and the run's figures (also written to the log history)."""
        self._require_joined()
        late_arguments.translate(self)
        self.trial, self.ignore_keys_for_eval = trial, ignore_keys_for_eval
        search.apply_trial(self, trial)
        if self.model_init is not None:
            setup.use_model(self, self._new_model(trial))
            self.events.model, self.optimizer, self.lr_scheduler = self.model, None, None
        setup.apply_changes(self)
        if dataloaders.is_empty(self.train_dataset) and not dataloaders.decides_batches(self):
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="pass train_dataset, or check --train_file",
            )
        constructor.require_evaluation_set(self)
        special_tokens.align(self.model, self.processing_class)
        earlier_runs.free(self.model)
        self.is_in_train = True
        try:
            with guarded(self.args):
                asked = resume_from_checkpoint or self.args.resume_from_checkpoint or self._after_restart()
                folder = restore.agreed_folder(asked, Path(self.args.output_dir), self.sync)
                if folder is not None:
                    self.use_arguments(other_ranks.with_step_of(folder, self.args, self.sync.n_ranks))
                    late_arguments.apply(self)
                return TrainingLoop(self).train(folder)
        finally:
            self.is_in_train, self.evaluated_weights = False, nullcontext

    @determinism.honoured
    @weight_average.honoured
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of the model on the data set (default: `eval_dataset`), each under `prefix_name`.

        A dict of data sets is evaluated one by one: `eval_NAME_loss`.
        """
        setup.apply_changes(self)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            return self._evaluate_each(
                dataset, given=eval_dataset is not None, keys=ignore_keys, prefix=metric_key_prefix
            )
        started_s = time.perf_counter()
        if self.evaluation is not None:
            dataset = dataloaders.evaluation_set(self, dataset)
            self._require_joined_results()
            metrics, n_rows = self.evaluation(self, dataset), len(dataset)
        else:
            loader = self.get_eval_dataloader(eval_dataset)
            keep = True if self.compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", keep, ignore_keys, metric_key_prefix)
            metrics, n_rows = output.metrics or {}, output.num_samples or 0
        metrics |= speed("", time.perf_counter() - started_s, n_rows, self._n_eval_batches(n_rows))
        named = results.prefixed(metrics, metric_key_prefix)
        self.log(named)
        self.events.send("on_evaluate", self.state, metrics=named)
        return named

    @determinism.honoured
    @weight_average.honoured
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the model's predictions (rows, ...), the labels if there are any, and the metrics."""
        setup.apply_changes(self)
        started_s = time.perf_counter()
        loader = self.get_test_dataloader(test_dataset)
        output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        metrics, n_rows = output.metrics or {}, output.num_samples or 0
        metrics |= speed("", time.perf_counter() - started_s, n_rows, self._n_eval_batches(n_rows))
        named = results.prefixed(metrics, metric_key_prefix)
        self.events.send("on_predict", self.state, metrics=named)
        return PredictionOutput(output.predictions, output.label_ids, named)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return predictions, labels, metrics (under `prefix_name`) and the number of rows of a loader's batches."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        found = evaluate.run(self, dataloader, keep=not loss_only, ignore_keys=ignore_keys)
        return found._replace(metrics=results.prefixed(found.metrics or {}, metric_key_prefix))

    prediction_loop = evaluation_loop

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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add figures to the log history and show them, with the epoch."""
        if self.state.epoch is not None:
            logs["epoch"] = round(self.state.epoch, 4)
        self.state.log_history.append(logs | {"step": self.state.global_step})
        run_log.write(
            ["  ".join(f"{name} {value}" for name, value in ({"step": self.state.global_step} | logs).items())]
        )
        self.events.send("on_log", self.state, logs=logs)

    def use_arguments(self, args: TrainingArguments) -> None:
        """Continue with other settings, those of a trial of a search."""
        self.args = args

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

    def _new_model(self, trial: Any = None) -> nn.Module:
        """Return a model from `model_init`, the same for the same seed."""
        set_seed(self.args.seed)
        return self.call_model_init(trial)

    def _evaluate_each(
        self, sets: Mapping[str, Any], *, given: bool, keys: list[str] | None, prefix: str
    ) -> dict[str, float]:
        if not overrides.accepts(self.evaluate, "metric_key_prefix"):
            raise ConfigError(
                what=f"evaluate of {type(self).__name__} takes no metric_key_prefix",
                why="the metrics of several data sets carry the names of the sets",
                fix="give evaluate the parameters of transformers' Trainer.evaluate, or pass one eval_dataset",
            )
        metrics: dict[str, float] = {}
        for n_left, (name, dataset) in zip(range(len(sets))[::-1], sets.items(), strict=True):
            self.events.begin_set(n_left)
            options = overrides.accepted(self.evaluate, ignore_keys=keys, metric_key_prefix=f"{prefix}_{name}")
            metrics |= self.evaluate(eval_dataset=dataset if given else name, **options)
        self.events.begin_set(None)
        return metrics

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


overrides.remember_originals(Trainer)
