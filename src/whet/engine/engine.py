"""The engine of whet's commands: it trains, evaluates and predicts with whet's step, batches and checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from whet.config import environment
from whet.config.arguments import TrainingArguments
from whet.config.environment import TRAINJOB
from whet.config.ranks import elsewhere, here
from whet.engine import description
from whet.engine.batches import make_plan
from whet.engine.loop import Outside, TrainingLoop
from whet.engine.prepare import Ready, follow_own_switch, prepare
from whet.engine.run import Prepared, Run, device_of, new_counters
from whet.engine.safe_points import guarded
from whet.engine.sync import Sync, require_complete
from whet.engine.trials.precision import PrecisionChoice
from whet.errors import ConfigError, DataError
from whet.log import logger
from whet.models.loading.special_tokens import align_special_tokens
from whet.objectives.base import Collate, Objective
from whet.precision import policy
from whet.store import best, compare, find, restore, weights
from whet.store.snapshot import counters_as_saved
from whet.watch import files as output_files
from whet.watch import lock, printing, progress, results, run_log
from whet.watch.determinism import deterministic
from whet.watch.events import Events
from whet.watch.guard import FirstGradients
from whet.watch.meter import speed


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a run of the engine is given."""

    model: nn.Module
    """Any module that returns a loss; known families and heads run without padding. It is changed in place."""
    args: TrainingArguments
    train_dataset: Any = None
    """Rows with an index, as are those of `eval_dataset`."""
    eval_dataset: Any = None
    processing_class: Any = None
    """The tokenizer, which pads rows and is saved next to the weights."""
    data_collator: Collate | None = None
    """None: rows are padded by the tokenizer."""
    padded_length: int | None = None
    """The length that rows would be padded to without packing, for the log and for `padding_in_loss`; None: that of the
    longest row in their batch."""
    objective: Callable[[Ready], Objective] | None = None
    """Returns the objective to train with, from the prepared model with its own: a teacher's, or preferences."""
    before_steps: Callable[[Engine], None] | None = None
    """Called in a training with the weights before its first step, also if it resumes; not before trial steps."""
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None
    """Takes transformers' EvalPrediction of an evaluation, returns metrics."""
    preprocess_logits: Callable[..., Any] | None = None
    """Takes the logits and labels of a batch, returns the predictions that are kept."""
    evaluation: Callable[[Engine], dict[str, float]] | None = None
    """Replaces the loss and `compute_metrics`: evaluates the engine's model, returns metrics without a prefix. With
    several ranks it joins what each of them found, by `sync.in_order`."""
    callbacks: Sequence[Any] = ()
    optimizers: tuple[Optimizer | None, Any] = (None, None)
    """An optimizer and a schedule to use instead of those of the settings."""


class Engine:
    """Trains, evaluates and predicts what a RunSpec describes; `whet.Trainer` is for scripts, and transformers' own."""

    @run_log.buffered()
    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.args = spec, spec.args
        printing.configure(spec.args)
        self.sync = _sync_of(spec.args)
        """Makes the ranks of a run agree."""
        environment.require_known()
        self._require_evaluation_set()
        ready = prepare(spec.model, spec.args, spec.data_collator, spec.processing_class, spec.padded_length)
        self.model = ready.model
        self.objective = ready.objective if spec.objective is None else spec.objective(ready)
        self.precision = PrecisionChoice(ready.precision)
        self.state = new_counters(spec.args, self.sync.place)
        self.files: dict[str, str] = {}
        """Small files by name that each checkpoint of a training holds, next to what every model has."""
        self._loop, self._has_trained = None, False
        self._shows_start = True
        """Whether an evaluation shows the first lines: not after those of a training, or of another evaluation."""
        first_gradients = FirstGradients(self.sync, in_backward=spec.args.optimizer_in_backward)
        own = [*_default_callbacks(spec.args, self.device), first_gradients, *spec.callbacks]
        self.events = Events(spec.args, own, model=self.model, processing_class=spec.processing_class)
        self.events.send("on_init_end", self.state)

    _loop: TrainingLoop | None
    """The training that runs now."""
    _weights_step: int | None = None
    """The step whose weights a training has ended with; None while it runs, and before one."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    @property
    def prepared(self) -> Prepared:
        """What is trained and evaluated."""
        spec = self.spec
        return Prepared(
            args=self.args, model=self.model, objective=self.objective, sync=self.sync,
            train_dataset=spec.train_dataset, eval_dataset=spec.eval_dataset,
            processing_class=spec.processing_class, padded_length=spec.padded_length, files=self.files,
        )  # fmt: skip

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train; return the last step, the mean loss and the run's figures (also written to the log history)."""
        self._require_joined()
        require_complete(self.model)
        if self.spec.train_dataset is None or not len(self.spec.train_dataset):
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="check --train_file",
            )
        self._require_evaluation_set()
        align_special_tokens(self.model, self.spec.processing_class)
        follow_own_switch(self.model, self.args)
        with deterministic(self.args.full_determinism), guarded(self.args):
            output_dir = Path(self.args.output_dir)
            asked = resume_from_checkpoint or self.args.resume_from_checkpoint
            training = find.Training.begins(output_dir, self.sync.gather(find.seen_here(), find.is_seen))
            if self.sync.place.is_first:
                lock.note_launches(output_dir, training.launches)
            overwrites = self.args.overwrite_output_dir
            folder = restore.agreed_folder(asked, output_dir, training, self.sync, overwrites=overwrites)
            if folder is not None:
                self.args = self.events.args = compare.with_step_of(folder, self.args, self.sync.n_ranks)
            self._loop = self.new_loop()
            try:
                trained = self._loop.train(folder, training, named=find.is_named(asked))
                self._weights_step = best.step_of_weights(self.args, self.state)
                return trained
            finally:
                self._loop = None

    def planned(self) -> Run:
        """Return the run that a training of this model would be."""
        return Run(**vars(self.prepared), plan=make_plan(self.args, self.spec.train_dataset))

    def new_loop(self, *, is_trial: bool = False) -> TrainingLoop:
        """Return a training of this model that has not begun; its counters are those of the engine from now on."""
        run = replace(self.planned(), is_trial=is_trial)
        self._shows_start = False
        before_steps = self.spec.before_steps
        outside = Outside(
            evaluate=self.evaluate, log=self.log, show_start=self._show_start,
            before_steps=(lambda: None) if before_steps is None else partial(before_steps, self),
        )  # fmt: skip
        loop = TrainingLoop(
            run, self.precision, self.events, outside, collator=self.spec.data_collator,
            optimizers=self.spec.optimizers, draws_new_layers=not self._has_trained,
        )  # fmt: skip
        self.state, self._has_trained, self._weights_step = loop.counters, True, None
        return loop

    def evaluate(
        self,
        rows: Any = None,
        metric_key_prefix: str = "eval",
        evaluation: Callable[[Engine], dict[str, float]] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the model on the rows (default: `eval_dataset`), each under `prefix_name`.

        `evaluation` takes the place of the RunSpec's.
        """
        rows = self.spec.eval_dataset if rows is None else rows
        if rows is None:
            raise _no_evaluation_set("it was asked for")
        evaluation = evaluation or self.spec.evaluation
        started_s = time.perf_counter()
        with self._evaluating():
            if evaluation is not None:
                metrics, n_rows = evaluation(self), len(rows)
            else:
                metrics_of = self.spec.compute_metrics
                keeps = metrics_of is not None and not self.args.prediction_loss_only
                output = self._evaluate(rows, metrics_of, keeps=keeps)
                metrics, n_rows = output.metrics or {}, output.num_samples or 0
            named = self._named(metrics, metric_key_prefix, n_rows, started_s)
            self.log(named)
            self.events.send("on_evaluate", self._state_of_weights(), metrics=named)
        return named

    def predict(
        self,
        rows: Any,
        metric_key_prefix: str = "test",
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
    ) -> PredictionOutput:
        """Return the model's predictions (rows, ...), the labels if there are any, and the metrics."""
        started_s = time.perf_counter()
        with self._evaluating():
            metrics_of = compute_metrics or self.spec.compute_metrics
            output = self._evaluate(rows, metrics_of, keeps=not self.args.prediction_loss_only)
            named = self._named(output.metrics or {}, metric_key_prefix, output.num_samples or 0, started_s)
            self.events.send("on_predict", self._state_of_weights(), metrics=named)
        return PredictionOutput(output.predictions, output.label_ids, named)

    def forward_batches(self, dataset: Any) -> Any:
        """Yield (batch, output) over the data set in order, without gradients; batches of the evaluation size."""
        n_rows, precision = self.args.per_device_eval_batch_size, self.evaluation_precision(dataset)
        if self._shows_start:
            self._show(description.of_evaluation(self.prepared, self._precision_in_words(), dataset))
        self._shows_start = False
        from whet.engine import evaluate

        batches = evaluate.forward_batches(self.model, self.objective, dataset, n_rows, precision, self.sync)
        n_done, total = 0, len(dataset)
        for batch, output in batches:
            yield batch, output
            n_done = min(n_done + batch.n_rows * self.sync.n_ranks, total)
            self.events.send("on_prediction_step", self.state, n_done=n_done, n_rows=total)

    def evaluation_precision(self, dataset: Any) -> policy.Precision:
        """Return the precision of an evaluation: that of the training, or before one the faster by measurement."""
        return self.precision.for_evaluation(self.prepared, dataset)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, configuration, tokenizer and training arguments, as files that transformers loads.

        Raises StorageError (exit 74) if writing fails.
        """
        output_files.write_model(Path(output_dir or self.args.output_dir), self.write_model)

    def write_model(self, folder: Path) -> None:
        """Write the files of `save_model` to an existing folder; errors of the disk are not translated."""
        require_complete(self.model)
        by_collator = getattr(self.spec.data_collator, "tokenizer", None)
        processing = by_collator if self.spec.processing_class is None else self.spec.processing_class
        weights.save_processing(processing, folder, taken={*weights.FILES, "training_args.json"})
        weights.save_weights(self.model, folder)
        (folder / "training_args.json").write_text(policy.as_run(self.args, self.precision.current) + "\n", "utf-8")

    def close(self, failed: bool = False) -> None:
        """End the runs of the trackers, as failed if they support that; a later log entry would start new ones."""
        if not self.args.report_to:
            return
        from whet.watch.trackers import Tracker

        for callback in self.events.callbacks:
            if isinstance(callback, Tracker):
                callback.close(failed)

    def log(self, logs: dict[str, float]) -> None:
        """Add figures to the log history and show them, with the step of the weights and its epoch."""
        state = self._state_of_weights()
        if state.epoch is not None:
            logs["epoch"] = round(state.epoch, 4)
        state.log_history.append(logs | {"step": state.global_step})
        run_log.write(["  ".join(f"{name} {value}" for name, value in ({"step": state.global_step} | logs).items())])
        self.events.send("on_log", state, logs=logs)

    def _state_of_weights(self) -> TrainerState:
        """Return the counters of the step whose weights the model has: an earlier one once the best are loaded.

        Otherwise an evaluation after the training would take the place of that of the last step.
        """
        step, state = self._weights_step, self.state
        if step is None or step == state.global_step:
            return state
        epochs = (entry["epoch"] for entry in state.log_history if entry["step"] == step and "epoch" in entry)
        return replace(state, global_step=step, epoch=next(epochs, state.epoch))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], files: Collection[str] | None = None) -> None:
        """Write {split}_results.json, and put the metrics into all_results.json; `files` as in `results.save`."""
        results.save(self.args.output_dir, split, metrics, files=files, on_error=self.args.save_error_policy)

    def save_state(self) -> None:
        """Write trainer_state.json: the counters and the log history, in transformers' form."""
        path = Path(self.args.output_dir) / "trainer_state.json"
        output_files.write_json(path, counters_as_saved(self.state), indent=2, on_error=self.args.save_error_policy)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Run the block with the weights that are evaluated: in a training they may be shared, or averaged."""
        require_complete(self.model)
        with deterministic(self.args.full_determinism):
            if self._loop is None:
                yield
                return
            with self._loop.evaluated_weights():
                yield

    def _evaluate(
        self, rows: Any, compute_metrics: Callable[..., Mapping[str, Any]] | None, *, keeps: bool
    ) -> EvalLoopOutput:
        from whet.engine import evaluate

        return evaluate.Evaluation(
            objective=self.objective, sync=self.sync, keeps=keeps, label_names=self.args.label_names,
            compute_metrics=compute_metrics, preprocess_logits=self.spec.preprocess_logits,
        ).run(self.forward_batches(rows))  # fmt: skip

    def _named(self, metrics: Mapping[str, Any], prefix: str, n_rows: int, started_s: float) -> dict[str, Any]:
        """Return the metrics of an evaluation with its speed, under names with the prefix."""
        n_batches = -(-n_rows // self.args.per_device_eval_batch_size)
        return results.prefixed({**metrics, **speed("", time.perf_counter() - started_s, n_rows, n_batches)}, prefix)

    def _precision_in_words(self) -> str:
        return self.precision.why or self.precision.name

    def _show_start(self, run: Run, counters: TrainerState, optimizer: Optimizer) -> None:
        known = self.spec.optimizers[0] is None  # the size of its state, before the first step
        precision = self._precision_in_words()
        self._show(description.of_training(run, precision, counters, optimizer, state_is_known=known))

    def _show(self, lines: Sequence[str]) -> None:
        """Print the lines; only write them to run.log if the callback that shows the run was removed."""
        shows = any(isinstance(one, progress.SHOWS) for one in self.events.callbacks)
        (printing.show if shows else run_log.write)(lines)

    def _require_evaluation_set(self) -> None:
        """Raise ConfigError if a training would evaluate, and there is nothing to evaluate on."""
        if self.args.eval_strategy != "no" and self.spec.eval_dataset is None and self.spec.evaluation is None:
            raise _no_evaluation_set("evaluation was asked for", f"eval_strategy={self.args.eval_strategy}")

    def _require_joined(self) -> None:
        place = here()
        if place.n_ranks != self.sync.n_ranks:
            raise ConfigError(
                what="the ranks of this process appeared after its engine was made",
                got=f"{place.n_ranks} ranks now, {self.sync.n_ranks} then",
                why="an engine joins the others when it is made",
                fix="call init_process_group, and set the variables of a launcher, before Engine(...)",
            )


def _no_evaluation_set(why: str, got: str | None = None) -> ConfigError:
    return ConfigError(
        what="there is no data set to evaluate on",
        got=got,
        why=why,
        fix="add --validation_file, or use --eval_strategy no",
    )


def _sync_of(args: TrainingArguments) -> Sync:
    """Return how the ranks of this process's run agree; this process joins them unless it has."""
    if "ray.train" in sys.modules and args.device.type == "cpu":
        from whet.dist import ray_workers

        if said := ray_workers.use_cores(here()):
            logger.warning("%s", said)
    if here().n_ranks == 1:
        return Sync()
    from whet.engine.many_ranks import joined, planned

    return joined(args) if elsewhere() is None else planned(args, here())


def _default_callbacks(args: TrainingArguments, device: torch.device) -> list[Any]:
    """Return the callbacks that show and record the run."""
    found: list[Any] = []
    if here().is_first:  # rank 0 shows and records for all
        found = [progress.for_this_output(bar=not args.disable_tqdm, form=args.log_format), *_recorders(args)]
    if args.profile and here().is_first:
        from whet.watch.profile import StepProfile

        found.insert(0, StepProfile())
    if args.torch_empty_cache_steps is not None:
        from whet.watch import empty_cache

        found += empty_cache.build(args, device)
    return found


def _recorders(args: TrainingArguments) -> list[Any]:
    """Return the callbacks that send what is logged to somebody else."""
    found: list[Any] = []
    if args.report_to:
        from whet.watch import trackers

        found += trackers.build(args)
    if TRAINJOB in os.environ:
        from whet.watch import trainjob

        found += trainjob.build()
    return found
