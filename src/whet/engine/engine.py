"""The engine of whet's commands: it trains, evaluates and predicts with whet's step, batches and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from whet.config import environment
from whet.config.arguments import TrainingArguments
from whet.config.ranks import here, require_output_for_restarts, restarted
from whet.engine import evaluate, model_card, start_block
from whet.engine.batches import make_plan
from whet.engine.first_gradients import FirstGradients
from whet.engine.loop import Outside, TrainingLoop
from whet.engine.many_ranks import sync_of
from whet.engine.prepare import align_special_tokens, prepare
from whet.engine.run import Prepared, Run, device_of, new_counters
from whet.engine.safe_points import guarded
from whet.engine.sharding.shares import require_complete
from whet.engine.trials.precision import PrecisionChoice
from whet.errors import ConfigError, DataError
from whet.objectives.base import Collate
from whet.precision import policy
from whet.store import compare, restore, weights
from whet.store.snapshot import counters_as_saved
from whet.watch import empty_cache, printing, profile, progress, results, run_log, trackers, trainjob
from whet.watch import files as output_files
from whet.watch.determinism import deterministic
from whet.watch.events import Events
from whet.watch.meter import speed

Evaluation = Callable[["Trainer", Any], dict[str, float]]
"""Evaluates the trainer's model on a data set; returns metrics without a prefix."""


class Trainer:
    """Train any module that returns a loss; models of known families and heads train without padding.

    `whet.Trainer` is for scripts: it is transformers' own. `evaluation` replaces the loss and `compute_metrics` of an
    evaluation. `padded_length` is the length that rows would be padded to without packing; None: that of the longest
    row in their batch (for the log, and for `padding_in_loss`).
    """

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
        self.args = args = TrainingArguments() if args is None else args
        printing.configure(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.data_collator = processing_class, data_collator
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.evaluation, self.padded_length = evaluation, padded_length
        self.before_steps: Callable[[], None] = lambda: None
        """Called in a training, with the weights before its steps."""
        self.sync = sync_of(args)
        """Makes the ranks of a run agree."""
        environment.require_known()
        self._require_evaluation_set()
        ready = prepare(model, args, data_collator, processing_class, padded_length)
        self.model, self.objective, self.collate = ready.model, ready.objective, ready.collate
        self.precision = PrecisionChoice(ready.precision)
        self.state = new_counters(args, self.sync.place)
        self._given_optimizers, self._loop, self._has_trained = optimizers, None, False
        self._shows_start = True
        """Whether an evaluation shows the first lines: not after those of a training, or of another evaluation."""
        first_gradients = FirstGradients(self.sync, in_backward=args.optimizer_in_backward)
        own = [*_default_callbacks(args, self.device), first_gradients, *(callbacks or ())]
        self.events = Events(args, own, model=self.model, processing_class=processing_class)
        self.events.send("on_init_end", self.state)

    _loop: TrainingLoop | None
    """The training that runs now."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    @property
    def prepared(self) -> Prepared:
        """What is trained and evaluated."""
        return Prepared(**self._facts())

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train; return the last step, the mean loss and the run's figures (also written to the log history)."""
        self._require_joined()
        require_complete(self.model)
        if self.train_dataset is None or not len(self.train_dataset):
            raise DataError(
                what="the training set is empty",
                why="there is nothing to learn from",
                fix="pass train_dataset, or check --train_file",
            )
        self._require_evaluation_set()
        align_special_tokens(self.model, self.processing_class)
        with deterministic(self.args.full_determinism), guarded(self.args):
            require_output_for_restarts(overwrites=self.args.overwrite_output_dir)
            asked = resume_from_checkpoint or self.args.resume_from_checkpoint or ("auto" if restarted() else None)
            folder = restore.agreed_folder(asked, Path(self.args.output_dir), self.sync)
            if folder is not None:
                self.args = self.events.args = compare.with_step_of(folder, self.args, self.sync.n_ranks)
            self._loop = self.new_loop()
            try:
                return self._loop.train(folder)
            finally:
                self._loop = None

    def new_loop(self) -> TrainingLoop:
        """Return a training of this model that has not begun; its counters are those of the engine from now on."""
        run = Run(**self._facts(), plan=make_plan(self.args, self.train_dataset))
        self._shows_start = False
        outside = Outside(
            evaluate=self.evaluate, log=self.log, before_steps=self.before_steps, show_start=self._show_start
        )  # fmt: skip
        loop = TrainingLoop(
            run, self.precision, self.events, outside, collator=self.data_collator,
            optimizers=self._given_optimizers, draws_new_layers=not self._has_trained,
        )  # fmt: skip
        self.state, self._has_trained = loop.counters, True
        return loop

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the metrics of the model on the data set (default: `eval_dataset`), each under `prefix_name`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise _no_evaluation_set("it was asked for")
        started_s = time.perf_counter()
        with self._evaluating():
            if self.evaluation is not None:
                self._require_joined_results()
                metrics, n_rows = self.evaluation(self, dataset), len(dataset)
            else:
                keeps = self.compute_metrics is not None and not self.args.prediction_loss_only
                output = self._evaluate(dataset, keeps=keeps)
                metrics, n_rows = output.metrics or {}, output.num_samples or 0
            named = self._named(metrics, metric_key_prefix, n_rows, started_s)
            self.log(named)
            self.events.send("on_evaluate", self.state, metrics=named)
        return named

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the model's predictions (rows, ...), the labels if there are any, and the metrics."""
        started_s = time.perf_counter()
        with self._evaluating():
            output = self._evaluate(test_dataset, keeps=not self.args.prediction_loss_only)
            named = self._named(output.metrics or {}, metric_key_prefix, output.num_samples or 0, started_s)
            self.events.send("on_predict", self.state, metrics=named)
        return PredictionOutput(output.predictions, output.label_ids, named)

    def forward_batches(self, dataset: Any) -> Any:
        """Yield (batch, output) over the data set in order, without gradients; batches of the evaluation size."""
        n_rows, precision = self.args.per_device_eval_batch_size, self.evaluation_precision(dataset)
        if self._shows_start:
            self._show(start_block.of_evaluation(self.prepared, self._precision_in_words(), dataset))
        self._shows_start = False
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
        by_collator = getattr(self.data_collator, "tokenizer", None)
        processing = by_collator if self.processing_class is None else self.processing_class
        weights.save_processing(processing, folder, taken={*weights.FILES, "training_args.json"})
        weights.save_weights(self.model, folder)
        (folder / "training_args.json").write_text(policy.as_run(self.args, self.precision.current) + "\n", "utf-8")

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
        output_files.write_json(path, counters_as_saved(self.state), indent=2, on_error=self.args.save_error_policy)

    def create_model_card(self, **facts: Any) -> None:
        """Write a draft of a model card, README.md, into the output folder; `facts` are those of transformers' card."""
        if self.args.should_save:
            model_card.write(self.prepared, self.precision.name, self.state, facts)

    def _facts(self) -> dict[str, Any]:
        return {
            "args": self.args, "model": self.model, "objective": self.objective, "sync": self.sync,
            "train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset,
            "processing_class": self.processing_class, "padded_length": self.padded_length,
        }  # fmt: skip

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

    def _evaluate(self, dataset: Any, *, keeps: bool) -> EvalLoopOutput:
        return evaluate.Evaluation(
            objective=self.objective, sync=self.sync, keeps=keeps, label_names=self.args.label_names,
            compute_metrics=self.compute_metrics, preprocess_logits=self.preprocess_logits_for_metrics,
        ).run(self.forward_batches(dataset))  # fmt: skip

    def _named(self, metrics: Mapping[str, Any], prefix: str, n_rows: int, started_s: float) -> dict[str, Any]:
        """Return the metrics of an evaluation with its speed, under names with the prefix."""
        n_batches = -(-n_rows // self.args.per_device_eval_batch_size)
        return results.prefixed({**metrics, **speed("", time.perf_counter() - started_s, n_rows, n_batches)}, prefix)

    def _precision_in_words(self) -> str:
        return self.precision.why or self.precision.name

    def _show_start(self, run: Run, counters: TrainerState, optimizer: Optimizer) -> None:
        known = self._given_optimizers[0] is None  # the size of its state, before the first step
        precision = self._precision_in_words()
        self._show(start_block.of_training(run, precision, counters, optimizer, state_is_known=known))

    def _show(self, lines: Sequence[str]) -> None:
        """Print the lines; only write them to run.log if the callback that shows the run was removed."""
        shows = any(isinstance(one, progress.SHOWS) for one in self.events.callbacks)
        (printing.show if shows else run_log.write)(lines)

    def _require_evaluation_set(self) -> None:
        """Raise ConfigError if a training would evaluate, and there is nothing to evaluate on."""
        if self.args.eval_strategy != "no" and self.eval_dataset is None and self.evaluation is None:
            raise _no_evaluation_set("evaluation was asked for", f"eval_strategy={self.args.eval_strategy}")

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


def _no_evaluation_set(why: str, got: str | None = None) -> ConfigError:
    return ConfigError(
        what="there is no data set to evaluate on",
        got=got,
        why=why,
        fix="pass eval_dataset to Trainer, or use --eval_strategy no",
    )


def _default_callbacks(args: TrainingArguments, device: torch.device) -> list[Any]:
    """Return the callbacks that show and record the run."""
    if not here().is_first:  # rank 0 shows and records for all
        return empty_cache.build(args, device)
    shown = progress.for_this_output(bar=not args.disable_tqdm, form=args.log_format)
    return [*profile.build(args), shown, *trackers.build(args), *trainjob.build(), *empty_cache.build(args, device)]
