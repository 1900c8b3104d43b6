"""`whet.Trainer`: transformers' Trainer over a model that runs without padding, with checkpoints that cannot be lost.

The loop, evaluation, callbacks, flags and trackers are transformers' own. This class changes what the methods below
override, and nothing else: the model (`whet.optimize`), the optimizer's operator, the format of the products, how a
checkpoint is written and read, and where training stops when a signal, memory or a gradient asks for it.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType, convert_outputs_to_fp32
from huggingface_hub import HfApi
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, trainer
from transformers.integrations import integration_utils
from transformers.integrations.neftune import deactivate_neftune
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy, has_length
from transformers.utils.hub import PushInProgress

from whet.config.methods import may_use_graphs
from whet.config.optimizer_names import names
from whet.config.rules.schedule import BY_METRIC
from whet.config.upload import MODEL_FILES
from whet.engine.draws import Draws
from whet.engine.safe_points import no_first_step
from whet.engine.update import CLIP_EPS, EVENTS_OF_GRADIENTS, ClipInOptimizer, ClipInOwnPass
from whet.errors import EXIT_OTHER, EXIT_STOPPED_AND_SAVED, ConfigError, OutputError, StorageError
from whet.hf import between_ranks, gradient_norms, record, replay
from whet.hf.accelerator import forget_preparation, format_in_state
from whet.hf.arguments import TrainingArguments, is_own_optimizer, precision_of, setting
from whet.hf.gradient_norms import GradientNorms
from whet.hf.state import (
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    Folders,
    folder_to_resume,
    plain,
    random_state,
    read_state,
    set_random_state,
    training_begins,
)
from whet.kernels import allocator
from whet.kernels.adamw import gradient_norm
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.methods import fuse
from whet.methods.unpad import calls
from whet.models import adapters, finite
from whet.models.adapters import unwrapped
from whet.models.forwards import home_of, take_off_mixed_precision
from whet.models.packable import answers_questions
from whet.models.packed import packed_model, trial_of_graphs
from whet.optim import registry, schedule
from whet.optim.optimizers.native import NativeAdamW
from whet.optional import is_from
from whet.own_loop import locate
from whet.own_loop.changes import changes, may_show_padding
from whet.own_loop.optimize import change_for, note_options, optimize
from whet.precision import compare
from whet.precision.device import has_bf16
from whet.store import find, manifest, schema, write
from whet.store.compare import IN_GROUPS, changed_settings, curve, identity_of_model, identity_of_rows
from whet.store.optimizer import OptimizerState, alike, names_in, without_tensors
from whet.store.state import State, write_state
from whet.watch import files as output_files
from whet.watch import guard, lock, stop
from whet.watch.events import does_something
from whet.watch.record import running_command

_ARGUMENTS = "training_args.json"
_STAYS_HERE = ("_*", ".*", f"{PREFIX_CHECKPOINT_DIR}-*", f"{find.ASIDE}-*", TRAINING_ARGS_NAME)
"""What is never uploaded of an output folder: checkpoints, abandoned and half written ones too, what is hidden, and the
pickle of an earlier training by transformers, which holds its hub_token."""
_PRECISION, _EPOCH, _SETTINGS, _DUE = "precision", "epoch", "settings", "due"
"""Facts of a checkpoint: what the products ran in; the epoch and the steps taken in it; the settings that change the
loss curve; and which of _FLAGS were set after its step if the training stopped in the evaluation that followed."""
_FLAGS = ("should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
"""What transformers' control holds of a step that is taken."""
_ASKED_BY = {"should_evaluate": "eval_strategy", "should_save": "save_strategy"}
"""The settings that let transformers set these flags."""
_ROWS = "rows_per_step"
_DIVIDED = {_ROWS, "per_device_train_batch_size", "precision"}
"""Settings that ranks, and the memory of their machines, decide."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that are narrower than float32."""
_LOADED = {*IN_GROUPS, "optim_args"}
"""Settings that an optimizer keeps with its state, which a resume loads."""


@dataclass(frozen=True)
class _Begun:
    """A step that has begun: what a run that stops within it resumes from."""

    step: int
    """The steps before it."""
    place: tuple[int, int]
    """The epoch of its first micro-batch, and the steps before it in that epoch."""
    random: Any
    """The random states before its first micro-batch."""


@dataclass(frozen=True)
class _AfterStep:
    """What follows a step, an evaluation among it: what a run that stops in this evaluation resumes with."""

    due: list[str]
    """Those of _FLAGS that are set."""
    random: Any
    """The random states before it."""


class Trainer(transformers.Trainer):
    """transformers' Trainer, whose models run without padding and whose checkpoints are atomic, sealed and plain.

    Takes what transformers' class takes, in the same order, and `tokenizer`, the older name of `processing_class`.
    `args` may be transformers' TrainingArguments too. An encoder or decoder of a known family is changed in place by
    `whet.optimize`; any other model trains as it is, and the log says why.

    Killed at any moment and resumed, a training is bitwise equal to one that was not, on one rank and on several.
    """

    model: Any
    model_wrapped: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    _continues = False
    """Whether the training resumes from what it has saved itself, though nobody asked for it."""
    _training: find.Training | None = None
    """Which of the trainings in its output folder the present, or the last, one is."""
    _folders: Folders | None = None
    _saving_to: Path | None = None
    """The staging folder of the checkpoint that is being written."""
    _precision: str | None = None
    """What the products of the present, or the last, training run in; None: not chosen yet."""
    _made_for = "no"
    """The format that accelerate's state had when this Trainer's Accelerator was made."""
    _running = ExitStack()
    """What ends with the present training."""
    _begun: _Begun | None = None
    """The last step that has begun."""
    _epoch = (0, 0)
    """The present epoch, and the number of steps before it."""
    _began: tuple[int, Path | None] = (0, None)
    """The steps before this training, and the checkpoint that holds them."""
    _of_trial: Any = None
    """The trial of a search for hyperparameters that this training is; None: it is none."""
    _ignored_keys: list[str] | None = None
    """Outputs of the model that the training's evaluations leave out."""
    _hears = False
    """Whether a training runs, which a signal may stop."""
    _after_step: _AfterStep | None = None
    """What is being done after a step, if an evaluation is a part of it."""
    _stopped_in: _AfterStep | None = None
    """The same of a training that stops in this evaluation."""
    _resumed: tuple[str, list[str]] | None = None
    """The checkpoint of such a training, and what is due before the next step."""
    _random_after: Any = None
    """The random states after what was due, with which the next step begins."""
    _encoders: tuple[nn.Module, list[nn.Module]] | None = None
    """The model, and its encoders that compute batches without padding."""
    _norms = GradientNorms(0)
    _memory: guard.MemoryGuard | None = None
    _flops: tuple[nn.Module, int] | None = None
    """The model, and the operations of one token that transformers counts for it."""

    @functools.wraps(transformers.Trainer.__init__)
    def __init__(self, model: Any = None, args: Any = None, *more: Any, tokenizer: Any = None, **named: Any) -> None:
        if tokenizer is not None:
            named.setdefault("processing_class", tokenizer)
        args = TrainingArguments("tmp_trainer") if args is None else args
        if record.NAME in (args.report_to or ()):
            integration_utils.INTEGRATION_TO_CALLBACK.setdefault(record.NAME, record.RecordCallback)
        super().__init__(model, args, *more, **named)
        if folder := getattr(args, "logging_dir", None):
            for one in self.callback_handler.callbacks:
                if isinstance(one, integration_utils.TensorBoardCallback):
                    one.logging_dir = str(Path(folder).expanduser())
        self._change_model()
        if self.args.device.type == "cpu":
            allocator.keep_freed_memory()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of `model_init`, changed as one that is given."""
        model = super().call_model_init(trial)
        _change(model, self.args)
        return model

    def _change_model(self) -> None:
        self._encoders = None
        if self.model is None:  # between the trials of a search: `call_model_init` makes the next one
            return
        if not getattr(self, "is_distributed_loading_by_transformers", False):  # since 5.19
            _change(self.model, self.args)

    # ---- Training ----

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers' Trainer does; see there. `resume_from_checkpoint` also takes "auto".

        True and "auto" take the newest intact checkpoint of the output folder; "auto" begins at the first step if there
        is none. Where a launcher or a pod may have started this process again, None takes the newest one that this
        training has saved; each is known by its settings, model and rows. A restart takes the newest one, too, once
        this training has saved later ones than the checkpoint that is named. A trial of `hyperparameter_search` begins.

        The log names each setting that is another one than the checkpoint's. Raises ConfigError for another number of
        ranks with which other rows would be trained, StorageError for a checkpoint that is damaged or was not written
        by whet, Stopped (exit 75) or KeyboardInterrupt after a signal or for lack of memory, WhetError for lack of
        memory before the first step, and NonFiniteError (exit 70).
        """
        self._change_model()
        output_dir = Path(self._get_output_dir(trial))
        self._require_another_folder(output_dir)
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        writes = self.args.should_save and self.args.save_strategy != SaveStrategy.NO
        signals = stop.noting_signals() if setting(self.args, "save_on_signal") else nullcontext()
        alone = lock.locked_if_possible(output_dir) if writes else nullcontext()
        with alone, replay.one_at_a_time(), signals:
            is_first = self.is_world_process_zero()
            is_trial = trial is not None  # with settings of its own
            training = None if is_trial else training_begins(output_dir, self._identity, is_first=is_first)
            asked, self._training = resume_from_checkpoint, training or find.Training()
            folder = folder_to_resume(asked, output_dir, training, is_first=is_first, cleans_up=writes)
            named = find.is_named(asked)
            own = not asked or (named and folder != Path(str(asked)))
            self._continues = folder is not None and not is_trial and own
            self._folders = Folders(output_dir, folder, self._training, named=named, is_first=is_first)
            allocator.return_freed_memory()  # that of an earlier training would count as used
            self._memory = guard.memory_guard(setting(self.args, "memory_limit_gb"))
            self._begun, self._flops, self._of_trial, self._ignored_keys = None, None, trial, ignore_keys_for_eval
            self._after_step = self._stopped_in = self._resumed = self._random_after = None
            self._norms = GradientNorms(setting(self.args, "max_nonfinite_steps"))
            self._precision = None
            resumed = None if folder is None else str(folder)
            with ExitStack() as recorded:
                recorded.callback(allocator.return_freed_memory)
                for one in self._recorders():
                    recorded.enter_context(one.ending(self.args))
                self._running = recorded.enter_context(ExitStack())
                self._hears = True
                try:
                    found = super().train(resumed, trial, ignore_keys_for_eval)
                    self._norms.read()
                except (stop.Stopped, stop.Interrupted) as stopped:
                    self._log_stop(stopped)
                    raise
                finally:
                    self._hears = False
                    self._norms.release()
                    self._leave_training()
                return found

    def _log_stop(self, stopped: stop.Stopped | stop.Interrupted) -> None:
        """Log where the training is saved: Python prints nothing of a SystemExit; a command of whet's prints it."""
        if self.is_world_process_zero() and running_command() is None:
            again = [f"{name}={value!r}" for name, value in stopped.again.items()]
            logger.warning("%s%s", stopped, f"; resume with trainer.train({', '.join(again)})" if again else "")

    def _leave_training(self) -> None:
        """End what transformers ends only after the last step: NEFTune's noise, and the state of being in training."""
        noise = vars(self).pop("neftune_hook_handle", None)
        if noise is not None and self.is_in_train:
            deactivate_neftune(self.model, noise, self.accelerator)
        self.is_in_train = False

    def _recorders(self) -> list[record.RecordCallback]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, record.RecordCallback)]

    def get_train_dataloader(self) -> Any:
        """Return transformers' loader, whose random numbers follow from (seed, epoch, batch).

        A sampler, a data set or a collator that draws random numbers draws them again after a resume, and the dropout
        masks of the training do not move with what the data draw.
        """
        prepared = super().get_train_dataloader()
        if hasattr(prepared, "base_dataloader"):
            replay.replay(prepared, self.args.seed if self.args.data_seed is None else self.args.data_seed)
        return prepared

    def _run_epoch(self, *, epoch: int, epochs_trained: int, steps_trained_in_current_epoch: int, **named: Any) -> None:
        skipped = steps_trained_in_current_epoch if epoch == epochs_trained else 0
        self._epoch = (epoch, self.state.global_step - skipped // self.args.gradient_accumulation_steps)
        if self._resumed is not None:
            self._do_what_is_due(named["start_time"])
            if self.control.should_training_stop or (skipped and self.control.should_epoch_stop):
                return
        if self.state.global_step >= self.state.max_steps:  # a training that had ended; transformers takes a step more
            self.control.should_training_stop = True
            return
        alone = self.args.world_size == 1 and self.args.device.type == "cpu" and not self._by_engine
        tables = fuse.row_gradients_of(self._changed_encoders()) if alone else nullcontext()
        with _skipping_keeps_the_draws(), tables:
            super()._run_epoch(
                epoch=epoch, epochs_trained=epochs_trained,
                steps_trained_in_current_epoch=steps_trained_in_current_epoch, **named,
            )  # fmt: skip

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:  # fmt: skip
        """Return (epochs done, batches of the next one done); transformers divides, which is wrong for some data.

        A stream has no length, and a callback may end an epoch early: the checkpoint says where it was written.
        """
        if trial is not None:  # its settings are known by now
            self._change_model()
        if self._precision is None:  # else smaller batches are tried, after those that did not fit
            self._precision = self._chosen_precision(resume_from_checkpoint)
        found = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._find_best_next_to_it()
        folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        facts = {} if folder is None else manifest.facts_of(folder) or {}
        if folder is not None and trial is None:
            self._compare_with(facts, folder.name)
        place: Any = facts.get(_EPOCH)
        n_batches = self.args.gradient_accumulation_steps
        if _is_place(place) and not self.args.ignore_data_skip:
            epoch, n_steps = place
            found = (epoch + 1, 0) if n_steps >= num_update_steps_per_epoch else (epoch, n_steps * n_batches)
        self._epoch = (found[0], self.state.global_step - found[1] // n_batches)
        self._began = (self.state.global_step, folder)
        if folder is not None and (due := self._still_due(facts, folder)):
            self._resumed = str(folder), due
        return found

    def _still_due(self, facts: Mapping[str, Any], folder: Path) -> list[str]:
        """Return what was due when the checkpoint's training stopped, but for what has been switched off since then."""
        due = [one for one in _FLAGS if one in (facts.get(_DUE) or ())]
        if self._continues and facts.get(manifest.ENDED) == [self.state.global_step, self.state.max_steps]:
            if any(isinstance(one, EarlyStoppingCallback) for one in self.callback_handler.callbacks):
                due = ["should_training_stop"]  # which would not stop it again, as it has not seen what came before
            elif self.state.global_step < self.state.max_steps and self.is_world_process_zero():
                logger.warning(
                    "a callback had ended this training after step %d of %d: it trains on until one ends it again",
                    self.state.global_step, self.state.max_steps,
                )  # fmt: skip
        path = folder / _ARGUMENTS
        before = json.loads(path.read_text("utf-8")) if due and path.is_file() else {}
        for flag in [one for one in due if one in _ASKED_BY]:
            name = _ASKED_BY[flag]
            if getattr(self.args, name) == "no" != before.get(name):
                due.remove(flag)
                left_out = "evaluation" if flag == "should_evaluate" else "save"
                logger.warning("%s: the %s that was due there is left out, with %s=no", folder.name, left_out, name)
        return due

    def _compare_with(self, facts: Mapping[str, Any], name: str) -> None:
        """Log each setting that is another one than the checkpoint's; raise ConfigError if steps have other rows."""
        now, before = self._curve(), facts.get(_SETTINGS)
        before = before if isinstance(before, dict) else {}
        if (n_before := facts.get("n_ranks")) != self.args.world_size:
            self._require_same_rows(before.get(_ROWS), now[_ROWS], n_before, name)
        loaded = _LOADED | ({"lr_scheduler_kwargs"} if now["lr_scheduler_type"] in BY_METRIC else set())
        for one, text in changed_settings(before, now) if self.is_world_process_zero() else ():
            counts = "the checkpoint's stays, which is loaded" if one in loaded else "that of now counts from here on"
            logger.warning("resuming from %s with another setting: %s; %s", name, text, counts)

    def _require_same_rows(self, before: object, now: int, n_before: object, name: str) -> None:
        """Raise ConfigError if a step of this number of ranks has other rows than one of the checkpoint's training."""
        by_batch = self._order_by_batch()
        if before == now and by_batch is None:
            return
        raise ConfigError(
            what=f"{name} is of a training on another number of ranks, and would resume with other rows",
            got=f"ranks: {n_before} then, {self.args.world_size} now; rows of a step: {before} then, {now} now"
            + (f"; {by_batch}" if by_batch else ""),
            why="rows would be trained again, or never" + (", at another rate" if before != now else ""),
            fix=f"start as many ranks as then: {n_before}"
            + ("" if by_batch else f"; or choose per_device_train_batch_size and gradient_accumulation_steps so that "
               f"a step has {before} rows"),
        )  # fmt: skip

    def _order_by_batch(self) -> str | None:
        """Return what makes the order of rows depend on the size of a rank's batches; None: nothing does."""
        args, usual = self.args, transformers.Trainer
        reads = (type(self).get_train_dataloader, super().get_train_dataloader.__func__, type(self)._get_train_sampler)
        found = {
            "a stream is dealt out to ranks by its files, or by their batches": isinstance(
                self.train_dataset, IterableDataset
            ),
            f"train_sampling_strategy={args.train_sampling_strategy} orders rows by batches": (
                args.train_sampling_strategy not in ("random", "sequential")
            ),
            "dataloader_drop_last leaves out other rows": args.dataloader_drop_last,
            "split_batches deals out each batch": args.accelerator_config.split_batches,
            "the Trainer has a loader or a sampler of its own": reads
            != (Trainer.get_train_dataloader, usual.get_train_dataloader, usual._get_train_sampler),
        }
        return next((text for text, is_so in found.items() if is_so), None)

    def _curve(self) -> dict[str, Any]:
        """Return the settings that change the loss curve, as checkpoints hold them."""
        given = json.loads(self.args.to_json_string()) | {"precision": self._precision}
        rows = self.get_total_train_batch_size(self.args)
        found = curve(given, self.args.world_size) | {"data_seed": given["data_seed"], _ROWS: rows}
        return json.loads(json.dumps(found))

    def _identity(self) -> tuple[str | None, bool]:
        """Return what tells this training from others in its folder, and whether its rows are a part of that.

        Its settings, but for those that differ on another number of ranks; its model; and its rows as the loader takes
        them. A set of the user's own class is read here where the loader reads it in this process, too.
        """
        try:
            curve = {name: value for name, value in self._curve().items() if name not in _DIVIDED}
            model = None if self.model is None else identity_of_model(self.model, unwrapped(self.model))
            rows, n_rows, digest = self.train_dataset, None, None
            if rows is not None and has_length(rows):
                taken: Any = rows
                if is_from(taken, "datasets", "Dataset"):
                    taken = self._remove_unused_columns(taken, description="training")
                n_rows = len(taken)
                digest = identity_of_rows(taken, may_read=not self.args.dataloader_num_workers) if n_rows else ""
            known = {"settings": curve, "model": model, "rows": [n_rows, digest]}
            return manifest.digest_of(known), digest is not None
        except Exception as error:
            text = "this training is known by its number in the script, as its model and rows cannot be read here: %s"
            logger.info(text, error)
            return None, False

    def _find_best_next_to_it(self) -> None:
        """Find this training's own best checkpoint if its folder was moved, or another training has set it aside."""
        state, folders = self.state, self._folders
        if not state.best_global_step or folders is None:
            return
        known = Path(state.best_model_checkpoint or folders.output_dir / find.folder_name(state.best_global_step))
        found = folders.named(known)
        if found is None and known.is_dir():
            logger.warning("%s is not the best checkpoint of this training, but another one's", known)
        state.best_model_checkpoint = None if found is None else str(found)

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        """Return the batches of a step, as transformers' Trainer does; training may stop here, before each step.

        Unlike `training_step`, this is hardly ever replaced. Between evaluations, several ranks stop here alone.
        """
        found = super().get_batch_samples(*given, **named)
        if found[0]:  # at the end of a stream, transformers asks for many steps without batches
            self._stop_if_asked()
        return found

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the gradient of a micro-batch; training may stop here, between two micro-batches."""
        if self._step_begun is None:
            self._begun = _Begun(self.state.global_step, self._place, random_state(self.args.device))
        if self.args.world_size == 1:
            self._stop_if_asked()
        with self._targets_of(inputs, loss_alone=self._has_plain_loss() and self.label_smoother is None):
            return super().training_step(model, inputs, num_items_in_batch)

    @property
    def _step_begun(self) -> _Begun | None:
        """The step that has begun and is not complete.

        A stream may end within a step, whose gradient transformers carries into the next epoch.
        """
        begun = self._begun
        return begun if begun is not None and begun.step == self.state.global_step else None

    @property
    def _place(self) -> tuple[int, int]:
        """The epoch in which the next step begins, or the present one has begun, and the steps before it there."""
        begun = self._step_begun
        return (self._epoch[0], self.state.global_step - self._epoch[1]) if begun is None else begun.place

    def prediction_step(self, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Any:
        """Return loss, predictions and labels of a batch, as transformers' Trainer does; training may stop before."""
        self.stop_in_evaluation()
        with nullcontext() if self._hears else self._computing_in(self._precision_now()), self._targets_of(inputs):
            return super().prediction_step(model, inputs, *given, **named)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch: its part of the mean over the labels of all micro-batches and ranks.

        transformers' Trainer leaves this mean to the model. Most heads for classes and tokens return the mean of their
        own batch all the same: the loss and the gradient of N micro-batches or ranks would be N times too large
        (huggingface/transformers#47688).
        """
        part = self._part_of_step(inputs, num_items_in_batch)  # label smoothing takes the labels out of the inputs
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if part is None:
            return found
        return (found[0] * part, found[1]) if return_outputs else found * part

    def _part_of_step(self, inputs: Any, n_labels: Any) -> Any:
        """Return the part of the step's labels that are this micro-batch's; None if the loss is divided already.

        For a class whose loss transformers divides by the number of micro-batches, the part is that much larger.
        """
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        divided = not self.model_accepts_loss_kwargs or self.compute_loss_func or self.label_smoother is not None
        if n_labels is None or not isinstance(labels, torch.Tensor) or divided or self.args.n_gpu > 1:
            return None
        if not _returns_own_mean(type(unwrapped(self.model))):
            return None
        part = labels.ne(-100).sum() / n_labels
        is_divided_later = _KNOWS_SCALED and self.loss_is_scaled_for_ga is False
        return part * self.current_gradient_accumulation_steps if is_divided_later else part

    def _targets_of(self, inputs: Any, *, loss_alone: bool = False) -> AbstractContextManager[None]:
        """Let encoders without padding know the batch's labels, which a `compute_loss` may keep from the model."""
        given = inputs if isinstance(inputs, Mapping) else {}
        return _targets_of(self._changed_encoders(), given, loss_alone=loss_alone)

    def _changed_encoders(self) -> list[nn.Module]:
        if self._encoders is None or self._encoders[0] is not self.model:
            packed = [packed_model(encoder.model) for encoder in locate.encoders_in(self.model)]
            changed = [one.module for one in packed if one is not None and changes(one.module) is not None]
            self._encoders = (self.model, changed)
        return self._encoders[1]

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        self._norms.release()
        control = self.control
        if control.should_log or control.should_evaluate or control.should_save or control.should_training_stop:
            self._norms.read()
        self._after_step = self._what_follows() if control.should_evaluate else None
        super()._maybe_log_save_evaluate(*args, **named)
        self._after_step = None

    def _what_follows(self) -> _AfterStep | None:
        """Return what is due now after a step; None: nothing, or within a step, which comes again, and this with it."""
        due = [one for one in _FLAGS if getattr(self.control, one)]
        return _AfterStep(due, random_state(self.args.device)) if due and self._step_begun is None else None

    def _do_what_is_due(self, start_time: float) -> None:
        """Evaluate, and save if need be, after the last step of a training that stopped in this evaluation."""
        assert self._resumed is not None
        (checkpoint, due), self._resumed = self._resumed, None
        self._load_rng_state(checkpoint)
        for one in due:
            setattr(self.control, one, True)
        self._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, self._of_trial, self._epoch[0], self._ignored_keys, start_time
        )
        self._random_after = random_state(self.args.device)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self._resumed is not None:
            self._do_what_is_due(start_time)
        self._stop_after_steps()
        self._hears = False  # the model may become the best one; evaluations of callbacks belong to no step
        limit = self.args.save_total_limit
        best = self.state.best_model_checkpoint if limit == 1 else None
        self.args.save_total_limit = limit if best is None else None  # transformers would remove those of others, too
        try:
            found = super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit
        self._stop_at_end()
        if best is not None and self.args.should_save and self._folders is not None:
            for path in self._folders.own():
                if not path.samefile(best):
                    write.remove(path)
        self._note_end()
        return found

    def _stop_if_asked(self) -> None:
        """Save the completed steps and stop if a signal came, or if memory runs out.

        A training that has too little memory for its first step here fails: it would fail again.
        """
        name, shortage = self._agreed(stop.requested(), None if self._memory is None else self._memory.shortage())
        if name is None and shortage is None:
            return
        step = self.state.global_step
        if name is None and shortage is not None and not step:
            limit = None if setting(self.args, "memory_limit_gb") is None else "memory_limit_gb"
            raise no_first_step(shortage, _smaller_batches(self.args), limit)
        why = f"stopped by {name}" if name else f"stopped, as memory runs out ({shortage})"
        fails = name is None and step == self._began[0]
        raise _stopped(why, name, step, self._saved_now(), EXIT_OTHER if fails else EXIT_STOPPED_AND_SAVED)

    def stop_in_evaluation(self) -> None:
        """Save the completed steps and stop if a signal came to the training that this evaluation is a part of.

        A resumed training begins with the evaluation. Several ranks stop in those alone that transformers' loop begins
        after a step, in which all of them take part.
        """
        if not self._hears or (self.args.world_size > 1 and self._after_step is None):
            return
        name, _ = self._agreed(stop.requested(), None)
        if name is not None:
            self._stopped_in = self._after_step or self._what_follows()  # a callback's evaluation comes before that
            folder = self._saved_now()
            raise _stopped(f"stopped by {name} during the evaluation", name, self.state.global_step, folder)

    def _stop_after_steps(self) -> None:
        """Save the completed steps and stop if a signal came during the last one: the script is not to run on."""
        name, _ = self._agreed(stop.requested(), None)
        if name is None:
            return
        if self.state.global_step < self.state.max_steps:  # a callback has ended it, and would not do it again
            self._stopped_in = _AfterStep(["should_training_stop"], random_state(self.args.device))
        raise _stopped(f"stopped by {name}", name, self.state.global_step, self._saved_now())

    def _stop_at_end(self) -> None:
        """Stop if a signal came after the last step, when the model may have become the best one."""
        name, _ = self._agreed(stop.requested(), None)
        if name is None:
            return
        assert self._folders is not None
        step = self.state.global_step
        is_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        folder = self._folders.complete(step) if is_best else self._saved_now()
        self._note_end()
        if folder is not None or not is_best:
            raise _stopped(f"stopped by {name}", name, step, folder)
        folder, again = self._last_saved()
        code = EXIT_OTHER if folder is None else EXIT_STOPPED_AND_SAVED
        last = "nothing is saved to resume from" if folder is None else f"a restart repeats what came after {folder}"
        what = f"stopped by {name} after the last step: {last}"
        raise stop.Interrupted(what, again) if name == "SIGINT" else stop.Stopped(what, again, code)

    def _note_end(self) -> None:
        """Note in the last checkpoint that the training has ended: no other one in the folder continues it unasked."""
        last = self._last_saved()[0] if self.args.should_save and self._folders is not None else None
        if last is not None:
            with suppress(OSError, ValueError):  # what the disk does not take is not known later
                manifest.note(last, **{manifest.ENDED: [self.state.global_step, self.state.max_steps]})

    def _agreed(self, name: str | None, shortage: str | None) -> tuple[str | None, str | None]:
        """Return the signal, and the shortage of memory, that any of the ranks has seen."""
        if self.args.world_size == 1:
            return name, shortage
        seen = between_ranks.gather([name, shortage], _is_wish)
        return next((one for one, _ in seen if one), None), next((one for _, one in seen if one), None)

    def _saved_now(self) -> Path | None:
        """Return the checkpoint of the completed steps, written now if need be; None if there is none."""
        if not self.state.global_step:
            return None
        assert self._folders is not None
        step, output_dir = self.state.global_step, Path(self._get_output_dir(self._of_trial))
        folder = self._folders.complete(step)
        if folder is not None and self._stopped_in is None:
            return folder
        if self.state.global_step == self._began[0]:
            return self._began[1]
        self.model.zero_grad()
        only_model, self.args.save_only_model = self.args.save_only_model, False
        with ExitStack() as stack:
            stack.callback(setattr, self.args, "save_only_model", only_model)
            try:
                with between_ranks.together("the completed steps were not saved"):
                    stack.enter_context(lock.locked_if_possible(output_dir))  # with save_strategy no it is not, yet
            except OutputError as error:  # such as another training's lock: this one stops all the same
                logger.error("the completed steps are not saved: %s", error)
                return folder
            self._save_checkpoint(self.model_wrapped, self._of_trial)
        return self._folders.complete(step)

    def _own_folders(self) -> list[Path]:
        assert self._folders is not None
        return self._folders.own()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip as transformers does; whet's AdamW applies the factor itself where nobody else reads the gradient."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, NativeAdamW) or self.args.device.type != "cpu":
            return super()._clip_grad_norm(model)
        parameters = list(model.parameters())
        if not self._updates_alone(optimizer, parameters):
            return super()._clip_grad_norm(model)
        norm = gradient_norm([one.grad for one in parameters if one.grad is not None])
        factor = self.args.max_grad_norm / (norm + CLIP_EPS)
        factor = 1.0 if factor > 1 else factor  # NaN stays NaN
        ClipInOptimizer(optimizer, ClipInOwnPass(parameters), self._gradient_is_read).prepare(factor)
        return torch.tensor(norm)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return what transformers' Trainer counts; the model's parameters are counted once, and not in each step."""
        name = getattr(self.model, "main_input_name", "input_ids")
        main: Any = inputs.get(name)
        if not isinstance(main, torch.Tensor) or not main.numel():
            return super().floating_point_ops(inputs)
        if self._flops is None or self._flops[0] is not self.model:
            self._flops = (self.model, super().floating_point_ops({name: main.flatten()[:1]}))
        return self._flops[1] * main.numel()

    def _updates_alone(self, optimizer: Any, parameters: list[nn.Parameter]) -> bool:
        """Return whether whet's AdamW updates the parameters that are clipped, no others, and all of each."""
        own = {id(one) for one in parameters}
        return (
            self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
            and self.accelerator.scaler is None
            and all(id(one) in own for group in optimizer.param_groups for one in group["params"])
            and all(one.grad is None or type(one.grad) is torch.Tensor for one in parameters)
        )

    def _gradient_is_read(self) -> bool:
        """Return whether anybody but the optimizer may read the gradient after it is clipped."""
        recorders = self._recorders()  # which read the time
        others = [one for one in self.callback_handler.callbacks if one not in recorders]
        return (
            type(self.model).zero_grad is not nn.Module.zero_grad
            or type(self)._get_grad_norm is not Trainer._get_grad_norm
            or type(getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)).__module__ != LambdaLR.__module__
            or any(does_something(others, event) for event in EVENTS_OF_GRADIENTS)
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the step's gradient; a gradient that is not finite is dropped, so nothing is updated."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self._norms.most or self.accelerator.scaler is not None or norm is None:
            return norm
        optimizer, step = getattr(self.optimizer, "optimizer", self.optimizer), self.state.global_step + 1
        if not self._by_engine and gradient_norms.leaves_out_itself(optimizer, norm):
            self._norms.leave_to(optimizer, torch.as_tensor(norm), step)
        elif not self._norms.is_finite(float(norm), step):
            model.zero_grad(set_to_none=True)
        return norm

    # ---- Precision ----

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        """Return the model and the loader as accelerate prepares them; the model computes in this training's format."""
        self._running.close()  # of a try with larger batches
        self._running.enter_context(format_in_state(self.accelerator, self._made_for))
        if not self._by_engine and plain(self.model) is self.model:
            forget_preparation(self.model)
        found = super()._prepare_for_training(*given, **named)
        self._running.enter_context(self._computing_in(self._precision or "fp32"))
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, and keep the format that it was made for; transformers calls this."""
        super().create_accelerator_and_postprocess()
        self._made_for = vars(self.accelerator.state).get("_mixed_precision", "no")

    @contextmanager
    def _computing_in(self, precision: str) -> Iterator[None]:
        """Let the model's forward compute in this format, and not in what accelerate has put around it.

        An engine has its format in itself, unless `auto` has chosen another one.
        """
        model, before = self.model, vars(self.model).get("forward")
        in_engine = self._by_engine and self._asked() != "auto"
        if precision not in ("fp32", *_DTYPES) or in_engine or self.args.n_gpu > 1:
            yield
            return
        take_off_mixed_precision(model)
        if precision in _DTYPES:
            model.forward = _in_format(model, torch.autocast(self.args.device.type, _DTYPES[precision]))
        own = vars(model).get("forward")
        try:
            yield
        finally:
            if vars(model).get("forward") is own:  # nobody has restored the model in the meantime
                vars(model).pop("forward", None)
                if before is not None:
                    model.forward = before

    def _asked(self) -> str:
        """Return the format that is asked for: by the settings, or by those of an engine alone."""
        asked = precision_of(self.args)
        of_engine = self.accelerator.mixed_precision if asked == "auto" and self._by_engine else "no"
        return asked if of_engine == "no" else of_engine

    def _precision_now(self) -> str:
        """Return the format of passes outside of a training; `auto` has that of the last one."""
        asked = self._asked()
        return (self._precision or "fp32") if asked == "auto" else asked

    def _chosen_precision(self, folder: str | None) -> str:
        """Return the format that is asked for; of `auto` that of the checkpoint's training, or else the faster one."""
        asked = self._asked()
        self._require_possible(asked)
        if asked != "auto":
            return asked
        kept = None if folder is None else (manifest.facts_of(Path(folder)) or {}).get(_PRECISION)
        return kept if kept in ("fp32", "bf16") else between_ranks.of_first(self._faster_format(), schema.text)

    def _require_possible(self, asked: str) -> None:
        """Raise ConfigError for a format in which this Trainer would not compute."""
        made_for = getattr(self.args, "mixed_precision", "no")
        if self._by_engine and precision_of(self.args) not in ("auto", "fp32" if made_for == "no" else made_for):
            raise ConfigError(
                what=f"precision={asked!r} came too late for the engine of this Trainer",
                got=f"mixed_precision={made_for!r} when its TrainingArguments were made",
                why="DeepSpeed and FSDP keep the format that they were made with",
                fix=f"pass precision={asked!r} to the TrainingArguments, and then make the Trainer",
            )
        if asked == "fp16" and self.accelerator.scaler is None and not self._by_engine:
            raise ConfigError(
                what="this Trainer cannot train in fp16",
                got=f"device {self.args.device}, mixed_precision={made_for!r} when its TrainingArguments were made",
                why="accelerate scales the losses of fp16, for GPUs alone and if it knows of fp16 from the start",
                fix="use precision='bf16'; or, on a GPU, pass precision='fp16' to the TrainingArguments, and then make "
                "the Trainer",
            )
        if asked in _DTYPES and self.args.n_gpu > 1:
            raise ConfigError(
                what=f"{asked} would have no effect on several GPUs in one process",
                got=f"{self.args.n_gpu} GPUs",
                why="transformers puts the model into DataParallel, which computes in the format of the weights",
                fix=f"start a process for each GPU: torchrun --nproc_per_node {self.args.n_gpu} ...; or choose one GPU "
                "with CUDA_VISIBLE_DEVICES=0",
            )

    def _faster_format(self) -> str:
        if why := self._why_untimed():
            logger.info("precision auto: fp32; %s", why)
            return "fp32"
        try:
            times = compare.with_rows_that_fit(self.args.per_device_train_batch_size, self._timed)
        except Exception as error:  # the code that fails is the user's, and training will show it if it fails there too
            logger.warning("precision auto: fp32; a batch could not be tried: %s: %s", type(error).__name__, error)
            return "fp32"
        if times is None:
            logger.info("precision auto: fp32; a stream, or rows without the labels of a loss, are not tried")
            return "fp32"
        logger.info("precision auto: %s; %s", times.chosen, times.in_words)
        return times.chosen

    def _timed(self, n_rows: int, *, fp32: bool) -> compare.Times | None:
        """Return how long passes over the first rows take in both formats, or in bf16 alone; None without a loss."""
        if (batch := self._first_batch(n_rows)) is None:
            return None
        plain, half = (functools.partial(self._pass, batch, precision) for precision in ("fp32", "bf16"))
        with trial_of_graphs(self.model):
            return compare.alternate(plain if fp32 else None, half, time.perf_counter, self.args.device)

    def _why_untimed(self) -> str | None:
        """Return why the formats are not compared; None if they are."""
        if not has_bf16(self.args.device):
            return "this GPU has no bf16"
        if self.args.n_gpu > 1:
            return "several GPUs in one process compute in the format of the weights"
        if changes(self.model) is None or not hasattr(self.model, "num_parameters"):
            return "the model is none that whet changes"
        if not compare.is_worth_timing(self.model.num_parameters(exclude_embeddings=True)):
            return "the model is too small for bf16 to gain"
        if self.args.world_size > 1 and not self._has_plain_loss():
            return "on several ranks a loss of your own is not tried"
        return None

    def _first_batch(self, n_rows: int) -> Mapping[str, Any] | None:
        """Return the first rows of the training set as a batch with labels; None for a stream, or without a loss."""
        rows: Any = self.train_dataset
        if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
            return None
        if not len(rows):
            return None
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        with Draws(self.args.seed, self.data_collator, rows).apart(0):
            batch = collate([rows[number] for number in range(min(n_rows, len(rows)))])
        labelled = isinstance(batch, Mapping) and all(name in batch for name in self.label_names)
        return self._prepare_inputs(dict(batch)) if labelled and self.label_names else None

    def _has_plain_loss(self) -> bool:
        """Return whether the loss is that of transformers' Trainer: the model's own, or its smoothed labels'."""
        return type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None

    def _pass(self, batch: Mapping[str, Any], precision: str) -> None:
        """Run a forward and a backward pass of the training's loss that leave no trace."""
        training, buffers = self.model.training, [one.clone() for one in self.model.buffers()]
        config = getattr(self.model, "config", None)
        problem_type = getattr(config, "problem_type", None)  # heads for classes keep what labels of a batch look like
        try:
            with generators_kept():
                self.model.train()
                with self._computing_in(precision), self._targets_of(batch), self.compute_loss_context_manager():
                    loss = self.compute_loss(self.model, dict(batch))
                loss.backward()
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.train(training)
            if config is not None and getattr(config, "problem_type", None) != problem_type:
                config.problem_type = problem_type
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)

    # ---- Optimizer ----

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return the class of the optimizer and its arguments: whet's own for its names, else transformers'."""
        trained = [] if model is None else [one for one in model.parameters() if one.requires_grad]
        if not is_own_optimizer(args.optim):
            return _safe(super(Trainer, Trainer).get_optimizer_cls_and_kwargs(args, model), trained)
        if args.optim in names():
            chosen = registry.entry_for(args.optim, trained)
            if chosen is not registry.entry(args.optim) and not is_own_optimizer(chosen.name):
                plain = copy.copy(args)
                plain.optim = chosen.name
                return _safe(super(Trainer, Trainer).get_optimizer_cls_and_kwargs(plain, model), trained)
            if found := registry.class_for(args, trained):
                return found
        return functools.partial(functools.partial, _from_registry, args), {}

    # ---- Checkpoints ----

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._saving_to is None else str(self._saving_to)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let transformers write the checkpoint into a hidden folder, and publish it once it is complete."""
        output_dir, step = Path(self._get_output_dir(trial)), self.state.global_step
        if self._folders is None or self._folders.output_dir != output_dir:
            training = self._training or find.Training()
            self._folders = Folders(output_dir, None, training, is_first=self.is_world_process_zero())
        self._require_finite()
        facts: dict[str, Any] = {
            "n_ranks": self.args.world_size,
            "seed": self.args.seed,
            _PRECISION: self._precision,
            _EPOCH: [*self._place],
            _SETTINGS: self._curve(),
        }
        if self._stopped_in is not None:
            facts[_DUE] = self._stopped_in.due
        if self.args.save_only_model:
            facts[manifest.ONLY_MODEL] = True
        best = self.state.best_model_checkpoint
        try:
            fill = functools.partial(self._fill, model, trial, output_dir)
            unplanned = self.args.save_strategy == SaveStrategy.NO  # it stops, and nobody gave it the folder
            target = self._folders.write(step, fill, facts, leaves_others=unplanned)
        except StorageError as error:
            self.state.best_model_checkpoint = best
            if setting(self.args, "save_error_policy") == "stop":
                raise write.resumable(error, *self._last_saved()) from error
            logger.warning("training continues without this checkpoint: %s", error)
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            write.rotate(self._folders.own(), self.args.save_total_limit, None if best is None else Path(best))

    def _last_saved(self) -> tuple[Path | None, dict[str, object]]:
        complete = [path for path in self._own_folders() if not manifest.holds_only_model(path)]
        return (complete[-1], {"resume_from_checkpoint": True}) if complete else (None, {})

    def _fill(self, model: nn.Module, trial: Any, output_dir: Path, folder: Path) -> None:
        """Write the files of a checkpoint into the staging folder."""
        state, before = self.state, self.state.best_model_checkpoint
        self._saving_to = folder
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_to = None
        state.best_model_checkpoint = before  # transformers looked for it in the staging folder
        best = None if not state.best_global_step else output_dir / find.folder_name(state.best_global_step)
        if best is not None and (state.best_global_step == state.global_step or best in self._own_folders()):
            state.best_model_checkpoint = str(best)
        if self.args.should_save:
            state.save_to_json(str(folder / find.folder_name(state.global_step) / TRAINER_STATE_NAME))

    def _require_finite(self) -> None:
        if setting(self.args, "max_nonfinite_steps"):
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            finite.require_finite(self.model, inner, f"after step {self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model's files all or none, and the arguments as JSON in place of a pickle."""
        target = Path(self.args.output_dir if output_dir is None else output_dir)
        write = functools.partial(self._write_model, state_dict)
        if self._saving_to is not None or not self.args.should_save:
            write(target)
        else:
            self._require_another_folder(target)
            output_files.write_model(target, write)

    def _require_another_folder(self, folder: Path) -> None:
        for base in adapters.bases_of(self.model):
            adapters.require_another_folder(base, folder, what="the adapter", fix="use another output_dir")

    def _write_model(self, state_dict: Any, folder: Path) -> None:
        args, self.args = self.args, SimpleNamespace(output_dir=str(folder), should_save=self.args.should_save)
        try:
            super()._save(str(folder), state_dict)  # pickles what it takes for the arguments
        finally:
            self.args = args
        if self.args.should_save:
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            (folder / _ARGUMENTS).write_text(self.args.to_json_string() + "\n", "utf-8")

    @property
    def _by_engine(self) -> bool:
        """Whether an engine, such as DeepSpeed or FSDP, owns the state of the optimizer and saves it in its form."""
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._by_engine:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            write_state(Path(output_dir), OPTIMIZER, self._optimizer_state().state())
            write_state(Path(output_dir), SCHEDULER, without_tensors(schedule.state_of(self.lr_scheduler)))

    def _save_scaler(self, output_dir: str) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None and self.args.should_save:
            write_state(Path(output_dir), SCALER, dict(scaler.state_dict()))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states of all ranks; in the middle of a step or an evaluation, those before it began."""
        begun = self._stopped_in or self._step_begun
        own = random_state(self.args.device) if begun is None else begun.random
        states = between_ranks.gather(own, schema.json_object)
        if self.args.should_save:
            write_state(Path(output_dir), RANDOM, {str(rank): one for rank, one in enumerate(states)})

    def _optimizer_state(self) -> OptimizerState:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return OptimizerState(inner, names_in(inner, self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._by_engine:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        optimizer, scheduler = read_state(folder, OPTIMIZER), read_state(folder, SCHEDULER)
        if optimizer is None or scheduler is None:
            logger.warning("%s has no state of the optimizer and the schedule: both begin as in a new run", checkpoint)
            return
        with _fitting(folder):
            self._load_states(optimizer, scheduler)

    def _load_states(self, optimizer: State, scheduler: State) -> None:
        """Restore the optimizer and the schedule from what their checkpoint holds."""
        self._optimizer_state().load_state(optimizer)
        schedule.load_state(self.lr_scheduler, alike(scheduler, self.lr_scheduler.state_dict()))

    def _load_scaler(self, checkpoint: str | None) -> None:
        found = None if checkpoint is None else read_state(Path(checkpoint), SCALER)
        if found is not None:
            self.accelerator.scaler.load_state_dict(found)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._random_after is not None:
            set_random_state(self._random_after, self.args.device)
            self._random_after = None
            return
        found = None if checkpoint is None else read_state(Path(checkpoint), RANDOM)
        own = None if found is None else found.get(str(self.args.process_index))
        if own is not None:
            set_random_state(own, self.args.device)
        elif checkpoint is not None:
            logger.warning("%s has no random states of rank %d: dropout differs", checkpoint, self.args.process_index)

    # ---- The hub ----

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **named: Any,
    ) -> Any:
        """Upload the model, and what lies next to it but for checkpoints, as transformers' Trainer does; see there."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        private = {"private": named.pop("private")} if "private" in named else {}
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, **private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        named.setdefault("model_name", Path(self.args.hub_model_id or self.args.output_dir).name)
        if own := getattr(self.model, "model_tags", None):
            given = named.get("tags") or []
            named["tags"] = [*dict.fromkeys([*([given] if isinstance(given, str) else given), *own])]
        self.create_model_card(**named)
        self._finish_current_push()
        return self._upload(
            self.args.output_dir, commit_message, run_as_future=not blocking,
            token=token or self.args.hub_token, revision=revision or self.args.hub_revision,
        )  # fmt: skip

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the model of a checkpoint, and the checkpoint if hub_strategy asks for it, in the background.

        transformers calls this while the checkpoint is being written: nothing is uploaded before it has its name. Its
        model is copied into the output folder, with the arguments as JSON; transformers pickles them with the token.
        """
        args = self.args
        if self._saving_to is not None or not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        running: Any = self.push_in_progress
        if not args.hub_always_push and running is not None and not running.is_done():
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        folder = Path(checkpoint_folder)
        try:
            output_files.write_model(Path(args.output_dir), functools.partial(self._copy_model, folder))
        except StorageError as error:  # the checkpoint itself is complete
            logger.warning("%s is not on the hub (%s); the next save is uploaded again", folder.name, error)
            return
        by_step = args.save_strategy == SaveStrategy.STEPS
        done = f"step {self.state.global_step}" if by_step else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {done}"
        more = {"token": args.hub_token, "revision": args.hub_revision, "run_as_future": True}
        jobs: Any = [self._upload(args.output_dir, message, **more)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            jobs.append(self._upload(str(folder), f"{message}, checkpoint", path_in_repo=name, **more))
        if running is None or running.is_done():
            self.push_in_progress = PushInProgress(jobs)
        else:
            running.jobs.extend(jobs)

    def _copy_model(self, checkpoint: Path, folder: Path) -> None:
        """Copy the files of a checkpoint that belong to its model, with the tokenizer and the arguments."""
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        for path in [one for one in checkpoint.rglob("*") if one.is_file()]:
            name = path.relative_to(checkpoint)
            if any(fnmatchcase(name.as_posix(), one) for one in (*MODEL_FILES, _ARGUMENTS)):
                (folder / name.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)

    @functools.cached_property
    def _hub(self) -> HfApi:
        """The client of all uploads: those in the background follow each other."""
        return HfApi(library_name="whet")

    def _upload(self, folder: str, message: str | None, **more: Any) -> Any:
        name: Any = self.hub_model_id
        return self._hub.upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=[*_STAYS_HERE],
            **more,
        )  # fmt: skip


def _change(model: nn.Module, args: Any) -> None:
    """Let the model run without padding where it can, and log why where it cannot."""
    locate.prove_in(model)
    encoders = [encoder.model for encoder in locate.encoders_in(model)]
    why = locate.why_unchanged(encoders)
    if why is not None:
        logger.info("%s trains as it is, with its padding: %s", type(model).__name__, why)
        return
    padding: Any = getattr(args, "padding_in_loss", "auto")
    tokens: Any = getattr(args, "last_block_tokens", "read")
    options: dict[str, Any] = {"padding": padding, "last_block_tokens": tokens, "cuda_graphs": may_use_graphs(args)}
    if not change_for("whet.Trainer", model, options):
        return
    unknown = [one for one in encoders if may_show_padding(one) and not answers_questions(one)]
    if padding == "auto" and unknown:
        every: dict[str, Any] = options | {"padding": "all"}
        optimize(model, **every)
        note_options(model, options, by="whet.Trainer")
        text = 'what reads the states of %s is not known: padding_in_loss="none" is faster if it reads no padding'
        logger.info(text, " and ".join(type(one).__name__ for one in unknown))


def _in_format(model: nn.Module, autocast: torch.autocast) -> Callable[..., Any]:
    """Return the model's forward in a number format, as accelerate has it: what it returns is in float32."""
    forward: Any = model.forward
    if getattr(forward, "__self__", None) is not model:
        return convert_outputs_to_fp32(autocast(forward))
    return MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), model)


@contextmanager
def _targets_of(encoders: list[nn.Module], inputs: Mapping[str, Any], *, loss_alone: bool) -> Iterator[None]:
    """Note a batch's labels for every one of these: those at padding tokens need each of these tokens."""
    with ExitStack() as stack:
        for encoder in encoders:
            stack.enter_context(calls.targets_of(encoder, inputs, loss_alone=loss_alone))
        yield


def _stopped(
    why: str, name: str | None, step: int, folder: Path | None, code: int = EXIT_STOPPED_AND_SAVED
) -> stop.Stopped | stop.Interrupted:
    """Return the exception that ends training: KeyboardInterrupt after Ctrl-C, else Stopped with this exit code."""
    if folder is not None:
        what = f"{why} after step {step}: saved in {folder}, no completed step is lost"
    elif step:
        what = f"{why} after step {step}: its checkpoint could not be written"
    else:
        what = f"{why} before the first step was done"
    again = {} if folder is None else {"resume_from_checkpoint": str(folder)}
    return stop.Interrupted(what, again) if name == "SIGINT" else stop.Stopped(what, again, code)


def _smaller_batches(args: Any) -> str:
    """Return the settings for at most half as many rows in a micro-batch, in words; "" if it has only one."""
    rows, batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    fewer = next((one for one in range(rows // 2, 0, -1) if rows % one == 0), None)
    if fewer is None:
        return ""
    same = batches * rows // fewer
    return f"per_device_train_batch_size={fewer}, with gradient_accumulation_steps={same} for as many rows in a step"


_KNOWS_SCALED = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
"""Whether a class may say that its loss is still to be divided by the number of micro-batches: 5.18 ignores it."""
_LOSSES = ("loss_function", "cross_entropy", "CrossEntropyLoss", "BCEWithLogitsLoss", "MSELoss")


@functools.cache
def _returns_own_mean(model: type[nn.Module]) -> bool:
    """Return whether this class has a forward of transformers that computes a loss without `num_items_in_batch`.

    What a forward of a user's own returns is for them to divide: it may be a sum, or have terms of another kind.
    """
    if not home_of(inspect.unwrap(model.forward)).startswith("transformers."):
        return False
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(model.forward)))
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (OSError, TypeError, SyntaxError):  # a class without source
        return False
    losses = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in _LOSSES]
    handed_on = any(keyword.arg is None for call in losses for keyword in call.keywords)
    return bool(losses) and not handed_on and "num_items_in_batch" not in source


def _from_registry(args: Any, model: Any) -> torch.optim.Optimizer:
    """Return another optimizer of whet's, or one of a plug-in; its groups decay what transformers' do."""
    return registry.build(model, args)


def _safe(found: tuple[Any, Any], parameters: list[Any]) -> tuple[Any, Any]:
    """Return torch's plain AdamW for weights that are not contiguous: its fused operator for CPUs gets those wrong."""
    kind, given = found
    odd = any(not one.is_contiguous() for one in parameters if one.device.type == "cpu")
    return (kind, {**given, "fused": False}) if odd and given.get("fused") else found


@contextmanager
def _skipping_keeps_the_draws() -> Iterator[None]:
    """Let transformers' loop skip batches of an epoch so that those after them draw what they would have drawn."""
    loop: Any = trainer
    before: Callable[..., Any] = loop.skip_first_batches

    def skip(prepared: Any, n_batches: int = 0) -> Any:
        rest = before(prepared, n_batches)
        replay.replay_rest(rest, prepared, n_batches)
        return rest

    loop.skip_first_batches = skip
    try:
        yield
    finally:
        loop.skip_first_batches = before


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StorageError(
            what=f"{folder} does not fit this training",
            got=f"{type(error).__name__}: {error}"[:300],
            why="a training resumes with the same model, optimizer and schedule",
            fix="use the arguments of the training that wrote it; or start from its weights with a new output_dir",
        ) from error


def _is_place(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int and one >= 0 for one in value)


def _is_wish(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(one is None or isinstance(one, str) for one in value)
