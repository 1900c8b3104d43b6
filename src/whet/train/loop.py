"""The loop of a training run: steps, and what happens between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.profiler import record_function
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from whet.data.batch import Batch
from whet.log import logger
from whet.models import adapters
from whet.optim import in_backward, schedule
from whet.precision import formats
from whet.train import clipping, optimizing, step
from whet.train.batches import loading
from whet.train.checkpoint import best, optimizer_state, saving, weights
from whet.train.checkpoint import disk_space as space
from whet.train.checkpoint import folder as checkpoint
from whet.train.compat import late_arguments, overrides, search, user_loss
from whet.train.control import guard, stop
from whet.train.control.leave import Edges
from whet.train.meter import Meter, speed
from whet.train.output import obstacles
from whet.train.resume import restore as resume
from whet.train.resume.parts import OptimizerPart, SchedulePart
from whet.train.state import Stateful
from whet.train.trials import batch_size
from whet.train.trials import precision as probe

if TYPE_CHECKING:
    from whet.train.trainer import Trainer


class Fit:
    """One run of a Trainer, from the first step, or from a checkpoint, to the last."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.plan = loading.make_plan(trainer)
        self.optimizer, self.scheduler = optimizing.build(trainer, self.plan.n_steps)
        self.in_backward = in_backward.InBackward(self.optimizer) if self.args.optimizer_in_backward else None
        self.parameters = list(trainer.model.parameters())  # those without a gradient are passed over in each step
        self.untrained = optimizing.Untrained(trainer.model, self.optimizer)
        if self.args.save_strategy != "no":
            adapters.require_saved(trainer.model)
        self.clipping = clipping.choose(self.optimizer, self.parameters, trainer.events)
        self.flos_by_user = overrides.changed(trainer, "floating_point_ops")
        self.flos_per_token = 6.0 * weights.count_without_embeddings(trainer.model)
        self.meter = Meter()
        self.spikes = guard.SpikeGuard(self.args.max_loss_spike)
        self.saver = saving.Saver(self)
        self.edges = Edges(self)
        self.micro_rows = self.args.per_device_train_batch_size
        """Most rows in one forward and backward pass; auto_find_batch_size may find fewer."""
        self.loader = loading.build(self)
        self.started_s = time.time()
        trainer.state = TrainerState(train_batch_size=self.args.per_device_train_batch_size)
        trainer.state.is_hyper_param_search = trainer.trial is not None
        trainer.events.control = TrainerControl()

    @property
    def state(self) -> TrainerState:
        """The counters, in transformers' form."""
        return self.trainer.state

    def parts(self, changed: Set[str] = frozenset()) -> dict[str, Stateful]:
        """Return what a checkpoint holds of the run besides the model, in the order in which it is restored.

        `changed` are the settings that `--resume_allow_changes` lets differ from the checkpoint.
        """
        names = optimizer_state.names_in(self.optimizer, self.trainer.model)
        return {
            "meter": self.meter,
            "spikes": self.spikes,
            "precision": self.trainer.precision,
            "edges": self.edges,
            "callbacks": self.trainer.events,
            "loader": self.loader,
            "checkpoints": self.saver,
            "optimizer": OptimizerPart(self.optimizer, names, changed),
            "schedule": SchedulePart(self.optimizer, self.scheduler, changed),
        }

    @property
    def place(self) -> int:
        """Steps of the plan that are behind the run: those taken and those left out."""
        return self.state.global_step + self.loader.n_left_out

    @property
    def ended(self) -> bool:
        """Whether the plan is done, or a callback wants to stop."""
        return self.place >= self.plan.n_steps or self.trainer.events.control.should_training_stop

    def run(self, asked: str | bool | None) -> TrainOutput:
        """Run the steps that are left; return the last step, the mean loss and the figures."""
        self._begin(asked)
        self._send("on_train_begin")
        try:
            if self.args.eval_on_start and self.state.global_step == 0:
                self.edges.evaluate()
            self.edges.take_up()
            while not self.ended:
                self.edges.cross()
                self._one_step()
            self.edges.cross()
            self.saver.wait()
            guard.require_finite(self.trainer.model, None, "at the end of the training")
            best.load(self.trainer.model, self.args, self.state, self.saver.line)
            return self._finish()
        finally:
            self.loader.close()
            if self.in_backward is not None:
                self.in_backward.remove()
            self.trainer.model.zero_grad(set_to_none=True)  # of a step that was broken off
            self.optimizer.zero_grad(set_to_none=True)
            self.saver.close()
            self._send("on_train_end")

    def _begin(self, asked: str | bool | None) -> None:
        state, output_dir = self.state, Path(self.args.output_dir)
        state.max_steps, state.num_train_epochs = self.plan.n_steps, self.plan.n_epochs
        state.logging_steps = self.plan.log.every
        state.eval_steps, state.save_steps = self.plan.evaluate.every, self.plan.save.every
        state.global_step, state.epoch, state.total_flos = 0, 0.0, 0.0
        self.saver.begin()
        folder = resume.folder_to_resume(asked, output_dir)
        kept = None if folder is None else resume.precision_of(folder)
        rows = self.loader.sample(self.place) if folder is None or kept is None else np.arange(0)
        self.trainer.precision = probe.settle(self.trainer, rows, kept)
        if folder is None:
            probe.tell_compiled(self.trainer, rows)
        if folder is not None:
            resume.restore(self, folder)
        elif self.args.overwrite_output_dir:
            checkpoint.remove_all(output_dir)
        guard.require_finite(self.trainer.model, self.optimizer, "before the first step")
        if self.args.save_strategy != "no" or self.args.enable_jit_checkpoint:
            obstacles.require_free_names(output_dir, after=state.global_step, last=self.plan.n_steps)
        space.check(self)
        state.train_batch_size = self.micro_rows = batch_size.settle(self)
        self.trainer.model.train()

    def _one_step(self) -> None:
        self.saver.check()
        late_arguments.require_same_run(self.trainer, self.args)
        place = self.place
        if self.loader.begins_epoch(place):
            self._send("on_epoch_begin")
        self._send("on_step_begin")
        batches = self._batches(place)
        if not batches:
            self._run_dry()
            return
        rate = float(self.optimizer.param_groups[0]["lr"])
        result = self._update(batches)
        self.meter.add(batches, result, rate)
        self.state.total_flos += self._flos(batches)
        self.state.global_step += 1
        stop.something_done()
        self.state.epoch = self.loader.epochs_done(self.place)
        self._watch(result)
        self._send("on_step_end")
        self._between_steps(epoch_ends=self._end_epoch())

    @record_function("whet::data")
    def _batches(self, place: int) -> list[Batch]:
        return [batch.to(self.trainer.device) for batch in self.loader.take(place)]

    def _update(self, batches: list[Batch]) -> step.StepResult:
        """Take the optimizer's step and the schedule's: the rate follows the step's number, applied or not."""
        loss = self._gradients(batches)
        result = step.examine(self.parameters, loss, self.args.max_grad_norm, self.trainer.precision)
        if self.in_backward is not None:
            norm, whole = self.in_backward.finish()
            result = replace(result, grad_norm=norm, applied=result.applied and whole)
        result = self.spikes.judge(result)
        if result.applied:
            self.clipping.prepare(result.grad_scale)
            self._send("on_pre_optimizer_step")
            self.untrained.warn()
            self.optimizer.step()
            if self.meter.n_steps == self.meter.n_skipped:  # the first one here: now the optimizer has its state
                logger.info("%s", formats.describe(self.trainer.model, self.trainer.precision, self.optimizer))
            self._send("on_optimizer_step")
        self.trainer.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        schedule.after_step(self.scheduler)
        return result

    def _gradients(self, batches: list[Batch]) -> Tensor:
        trainer, done = self.trainer, self.state.global_step
        if trainer.user_loss:
            return user_loss.gradients(trainer, batches, step=done, between=self._between_batches)
        return step.gradients(
            trainer.objective, batches, trainer.precision, seed=self.args.seed, step=done,
            between=self._between_batches,
        )  # fmt: skip

    def _flos(self, batches: list[Batch]) -> float:
        if self.flos_by_user:
            return sum(float(self.trainer.floating_point_ops(dict(batch.inputs))) for batch in batches)
        return self.flos_per_token * sum(batch.n_computed for batch in batches)

    def _run_dry(self) -> None:
        """End the run before its last step, as the source of rows gives no more."""
        logger.warning(
            "the training set gives no more rows after step %d of %d: the training ends here",
            self.state.global_step, self.plan.n_steps,
        )  # fmt: skip
        self._send("on_epoch_end")
        self.trainer.events.control.should_training_stop = True

    def _between_batches(self) -> None:
        self._send("on_substep_end")
        self.edges.cross()

    def _watch(self, result: step.StepResult) -> None:
        """Stop after several steps in a row that were not finite, or spikes; none of them was applied."""
        if result.rescaled:
            return
        n_bad = self.spikes.n_bad_in_a_row = 0 if result.applied else self.spikes.n_bad_in_a_row + 1
        if not result.applied:
            guard.tell(self.state.global_step, result, self.args.max_loss_spike)
        if n_bad >= self.args.max_nonfinite_steps:
            raise guard.too_many(n_bad, self.state.global_step, result)

    def _end_epoch(self) -> bool:
        """Tell of the epoch's end, and return whether it is one: its last step, the run's, or a callback's wish."""
        if self.trainer.events.control.should_epoch_stop:
            self.loader.leave_epoch(self.place)
        ends = self.loader.ends_epoch(self.place) or self.ended
        if ends:
            self._send("on_epoch_end")
        return ends

    def _between_steps(self, *, epoch_ends: bool) -> None:
        """Log, evaluate, save, in this order: a checkpoint holds all that was found out at its step."""
        done = self.state.global_step
        first = done == 1 and self.args.logging_first_step
        if self.plan.log.due(done, epoch_ends) or self.trainer.events.control.should_log or first:
            self._log()
        self._judge_and_save(epoch_ends=epoch_ends)

    def _judge_and_save(self, *, epoch_ends: bool) -> None:
        control, done, complete = self.trainer.events.control, self.state.global_step, self.place >= self.plan.n_steps
        better = False
        last = complete and self.plan.evaluate.strategy == "steps" and done >= self.plan.evaluate.begins
        if self.plan.evaluate.due(done, epoch_ends) or control.should_evaluate or last:
            self.saver.wait()
            due = {"epoch_ends": epoch_ends, "evaluate": control.should_evaluate, "save": control.should_save}
            metrics = self.edges.evaluate(**due)
            schedule.after_evaluation(self.scheduler, self.args, metrics)
            better = best.is_better(self.args, self.state, metrics)
        due_now = self.saver.due(done, epoch_ends=epoch_ends, complete=complete, better=better)
        if due_now or self.trainer.events.control.should_save:
            self.saver.save(done, better=better)

    def evaluate(self) -> dict[str, float]:
        """Evaluate through the Trainer's method, which may be a user's; return its metrics."""
        trainer = self.trainer
        asked = {} if trainer.ignore_keys_for_eval is None else {"ignore_keys": trainer.ignore_keys_for_eval}
        found = trainer.evaluate(**overrides.given(trainer.evaluate, **asked))
        metrics = dict(found) if isinstance(found, Mapping) else {}
        search.report(trainer, metrics)
        return metrics

    def _log(self) -> None:
        meter = self.meter
        figures = {"loss": meter.window_loss(), "grad_norm": meter.grad_norm, "learning_rate": meter.learning_rate}
        self.trainer.log(figures, **overrides.given(self.trainer.log, start_time=self.started_s))

    def announce_save(self) -> None:
        """Tell of a checkpoint that is on the disk."""
        self._send("on_save")

    def _finish(self) -> TrainOutput:
        meter, seconds = self.meter, self.meter.elapsed_s
        metrics = (
            speed("train_", seconds, meter.n_rows, meter.n_steps)
            | {
                "train_tokens_per_second": round(meter.tokens_per_s, 1),
                "train_padding_avoided": round(meter.padding_avoided_frac, 4),
                "total_flos": self.state.total_flos,
                "train_loss": meter.mean_loss,
            }
            | ({"train_steps_not_applied": meter.n_skipped} if meter.n_skipped else {})
        )
        self.trainer.log(dict(metrics))
        return TrainOutput(self.state.global_step, meter.mean_loss, metrics | {"epoch": self.state.epoch or 0.0})

    def _send(self, event: str, **facts: Any) -> None:
        self.trainer.events.send(
            event, self.state, meter=self.meter, optimizer=self.optimizer, lr_scheduler=self.scheduler, **facts
        )
