"""The training loop: optimizer steps, and logging, evaluation and saving between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.optim import Optimizer
from torch.profiler import record_function
from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from whet.config import recipes
from whet.config.ranks import LostRankError
from whet.config.rules.sharing import stage_of_run
from whet.data.batch import Batch
from whet.data.store import RowStore
from whet.engine import prepare, step
from whet.engine.batches import BatchLoader
from whet.engine.run import Run, new_counters, reset
from whet.engine.safe_points import SafePoints
from whet.engine.sync import Sharing, require_own_state
from whet.engine.trials.precision import PrecisionChoice
from whet.engine.update import (
    OptimizerUpdate,
    UntrainedParameters,
    UpdateInBackward,
    WeightAverage,
    build_optimizer,
    choose_clipping,
)
from whet.log import logger
from whet.models import adapters, finite
from whet.models.adapters import unwrapped
from whet.models.experts.settings import settings_of
from whet.optim import schedule
from whet.precision import formats
from whet.store import best, compare, restore, schema, snapshot, weights, write
from whet.store.find import Training
from whet.store.optimizer import OptimizerPart, SchedulePart
from whet.store.save import Saver
from whet.store.snapshot import RunState
from whet.store.state import Stateful
from whet.watch import guard, stop
from whet.watch.events import Events
from whet.watch.meter import Ahead, Clock, Meter, counts_of, speed

if TYPE_CHECKING:
    from whet.optim.in_backward import InBackward


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What a training asks of the engine around it."""

    evaluate: Callable[[], dict[str, float]]
    """Evaluates the model, logs the metrics and returns them."""
    log: Callable[[dict[str, float]], None]
    """Adds figures to the log history and shows them."""
    before_steps: Callable[[], None]
    """Called with the weights before the first step, of a run that resumes too."""
    show_start: Callable[[Run, TrainerState, Optimizer], None]
    """Shows the first lines of the run."""


class TrainingLoop:
    """One training, from its first step or a checkpoint to its last step.

    The loop owns the parts of the run and gives each one what it needs; no part knows the loop.
    """

    run_state: RunState
    saver: Saver
    safe_points: SafePoints
    step_parts: step.StepParts
    """These four exist after `start`."""

    def __init__(
        self,
        run: Run,
        precision: PrecisionChoice,
        events: Events,
        outside: Outside,
        *,
        collator: Any = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        draws_new_layers: bool = True,
    ) -> None:
        """`optimizers` are an optimizer and a schedule to use instead of those of the settings.

        With `draws_new_layers`, a run that begins draws the layers that `reinit_layers` asks for.
        """
        args, model = run.args, run.model
        self.run, self.precision, self.events, self.outside, self.sync = run, precision, events, outside, run.sync
        self.optimizer, self.scheduler = build_optimizer(model, args, run.plan.n_steps, optimizers)
        self._state_is_known = optimizers[0] is None
        self._draws_new_layers = draws_new_layers
        self.average = WeightAverage(model, self.optimizer, args, run.plan.n_steps)
        self.sharing = _sharing_of(run, self.optimizer)
        self.untrained = UntrainedParameters(model, self.optimizer)
        self.in_backward: InBackward | None = None
        if args.optimizer_in_backward:
            from whet.optim.in_backward import InBackward

            self.in_backward = InBackward(self.optimizer)
        if args.save_strategy != "no":
            adapters.require_saved(model)
        self.flos_per_token = 6.0 * weights.count_without_embeddings(model)
        self.meter = Meter(clock=Clock(self._ahead))
        self.spikes = guard.SpikeGuard(args.max_loss_spike, in_backward=args.optimizer_in_backward)
        self.memory = guard.memory_guard(args.memory_limit_gb)
        self.loader = BatchLoader(run, collator)
        self.counters = new_counters(args, run.place)
        events.begin(self.optimizer, self.scheduler)

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Put the weights that are evaluated into the model: complete on each rank; their mean, if one is kept."""
        with self.sharing.evaluating(), self.average.in_model():
            yield

    @contextmanager
    def _saved_weights(self) -> Iterator[None]:
        with self.sharing.saving(), self.average.in_model():
            yield

    @property
    def plan_step(self) -> int:
        """Index of the next step in the plan: steps taken, plus steps left out when an epoch ended early."""
        return self.counters.global_step + self.loader.n_left_out

    @property
    def finished(self) -> bool:
        """Whether the plan is done, or a callback ends the training."""
        return self.plan_step >= self.run.plan.n_steps or self.sync.stop_early(self.events.control.should_training_stop)

    @property
    def _overwrites(self) -> bool:
        """Whether the checkpoints that an earlier run left in the folder go."""
        return self.run.args.overwrite_output_dir and self.saver.resumed_from is None

    def train(self, folder: Path | None, training: Training, *, named: bool = False) -> TrainOutput:
        """Take the remaining steps; return the last step, the mean loss and the metrics.

        `named` says whether the user named the checkpoint to resume from.
        """
        try:
            self.start(folder, training, named=named)
            self._send("on_train_begin")
            self.outside.show_start(self.run, self.counters, self.optimizer)
        except BaseException:
            self.sharing.abandon()
            raise
        try:
            if self.run.args.eval_on_start and self.counters.global_step == 0:
                self._evaluate({})
            self._do_pending()
            while not self.finished:
                self.safe_points.check()
                self.take_step()
            self.safe_points.check()
            self.saver.wait()
            self.sharing.finish()
            finite.require_finite(self.run.model, None, "at the end of the training")
            self.average.finish()
            self._load_best()
            return self._finish()
        except stop.Stopped:  # by all ranks
            self.sharing.finish()
            raise
        except LostRankError as lost:
            raise self.saver.saved_alone(lost) from lost
        except RuntimeError as error:  # torch's own, from the exchange inside a backward pass
            lost = self.sync.lost(error)
            if lost is None:
                raise
            raise self.saver.saved_alone(lost) from error
        finally:
            self.sharing.abandon()
            self._close()
            self._send("on_train_end")

    # ---- before the first step ----

    def start(self, folder: Path | None, training: Training | None = None, *, named: bool = False) -> None:
        """Begin at the first step, or resume from this checkpoint; `training` None: it saves nothing."""
        args, output_dir, counters = self.run.args, self.run.output_dir, self.counters
        reset(counters, self.run.plan)
        if parts := recipes.described(args):
            logger.info("recipe %s", ", ".join(parts))
        self._choose_precision(folder)
        if not self.run.is_trial:
            self.outside.before_steps()
        if folder is None:
            self._draw_new_layers()
        self._build_parts(training or Training())
        if folder is not None:
            self.saver.resume(folder, named=named)
            restore.restore(self.run_state, folder, self.saver.lineage, self._parts, self.sync)
            self.saver.rotate()
        else:
            self.saver.begins_with = compare.digest_of_weights(adapters.read_by_save(self.run.model).items())
        finite.require_finite(self.run.model, self.optimizer, "before the first step")
        if self.sync.place.is_first and (args.save_strategy != "no" or args.enable_jit_checkpoint):
            write.require_free_names(output_dir, after=counters.global_step, last=self.run.plan.n_steps)
        if self.sync.place.is_first:
            freed_bytes = write.bytes_of_all(output_dir) if self._overwrites else 0
            snapshot.require_room(self.run_state, len(self.saver.folders), freed_bytes)
        self.sharing.begin(self.run.model, self.optimizer)
        self._build_step()
        self._choose_micro_batch(folder)
        self.run.model.train()
        self.meter.start()

    def _load_best(self) -> None:
        if self.sync.place.is_first:
            best.load(self.run.model, self.run.args, self.counters, self.saver.lineage)
        if self.run.args.load_best_model_at_end:
            self.sync.wait()  # for a slow disk
            self.sync.copy_from_first(self.run.model)

    def _draw_new_layers(self) -> None:
        args = self.run.args
        if args.reinit_layers and self._draws_new_layers:
            draw = prepare.draw_by_recipe if recipes.sets(args, "reinit_layers") else prepare.draw_new_layers
            logger.info("%s", draw(self.run.model, args.reinit_layers, args.seed))

    def _choose_precision(self, folder: Path | None) -> None:
        """Choose the precision: that of the checkpoint in `folder`, or by timed passes over the next rows."""
        kept = None if folder is None else restore.precision_of(folder)
        rows = self.loader.rows(self.plan_step) if kept is None else np.arange(0)
        self.precision.for_training(self.run, rows, kept)
        if folder is None:
            self.precision.log_compile_speed(self.run, rows)

    def _build_parts(self, training: Training) -> None:
        """Build the parts that depend on the precision: saving and stopping."""
        self.run_state = RunState(
            run=self.run, counters=self.counters, meter=self.meter, optimizer=self.optimizer,
            precision=self.precision.current, identity=compare.identity_of(self.run, self.optimizer, self.scheduler),
            parts=self._parts, to_save=self._saved_weights,
            is_shared=lambda: self.sharing.is_on,
        )  # fmt: skip
        self.sync.begin(self.run.model)
        saved = lambda folder: self._send("on_save", folder=folder)  # noqa: E731 - it is handed on
        self.saver = Saver(self.run_state, saved, self.sync, training=training)
        self.safe_points = SafePoints(self.run_state, self.saver, self.events, self.sync, self.memory)

    def _build_step(self) -> None:
        parameters = self.sharing.parameters(self.run.model)  # a step skips those without a gradient
        update = OptimizerUpdate(
            model=self.run.model, parameters=parameters, optimizer=self.optimizer, scheduler=self.scheduler,
            clipping=choose_clipping(self.optimizer, parameters, self.events),
            untrained=self.untrained, send=self._send, stepping=self.sharing.stepping,
        )  # fmt: skip
        self.step_parts = step.StepParts(
            parameters=parameters,
            gradients=step.ObjectiveGradients(
                objective=self.run.objective, precision=self.precision.current, seed=self.run.args.seed, sync=self.sync,
                routing=_routing_of(self.run), trunk=_trunk_of(self.run),
                between=self._between_batches,
            ),
            update=self.sharing.update(update)
            if self.in_backward is None
            else UpdateInBackward(self.in_backward, update),
            precision=self.precision.current,
            sync=self.sync,
            reject_spike=None if self.spikes.limit is None else self.spikes.reject_spike,
            max_grad_norm=self.run.args.max_grad_norm,
            clock=self.meter.clock,
        )  # fmt: skip

    def _parts(self, changed: Set[str] = frozenset()) -> dict[str, Stateful]:
        """Return the parts that a checkpoint holds besides the model, in the order in which they are restored.

        `changed` are the settings that may differ from the checkpoint, by `--resume_allow_changes`.
        """
        return {
            "meter": self.meter,
            "spikes": self.spikes,
            "precision": self.precision.current,
            "edges": self.safe_points,
            "callbacks": self.events,
            "loader": self.loader,
            "checkpoints": self.saver,
            "average": self.average,
            "optimizer": self.sharing.optimizer_part(OptimizerPart(self.optimizer, self.run.model, changed)),
            "schedule": SchedulePart(self.optimizer, self.scheduler, changed),
        }

    def _choose_micro_batch(self, folder: Path | None) -> None:
        """Choose the rows of a micro-batch; those of the checkpoint in `folder`, if its run has chosen too."""
        if self.run.args.auto_find_batch_size or self.run.device.type == "cuda":
            from whet.engine.trials.batch_size import Trial, choose_micro_batch

            check = self.safe_points.check_signal if self.sync.n_ranks == 1 else _wait_for_the_trial
            known, kept = self._state_is_known, None if folder is None else restore.micro_rows_of(folder)
            rows = choose_micro_batch(
                Trial(self.run, self.precision.current, self.optimizer, not known, self.memory, check, kept)
            )
        else:
            rows = self.sync.micro_batch_rows(self.run.args.per_device_train_batch_size)
        self.counters.train_batch_size = self.loader.micro_rows = self.safe_points.micro_rows = rows
        self.safe_points.check_signal()

    # ---- a step ----

    def take_step(self) -> None:
        """Take one optimizer step, then log, evaluate and save if that is due."""
        self.saver.check()
        if self.loader.at_epoch(self.plan_step):
            self._send("on_epoch_begin")
        self._send("on_step_begin")
        self.meter.clock.begin_step()
        batches = self._next_batches()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        counts = counts_of(batches, self.run.padded_length)
        counts = self.sync.total_counts(counts)  # before the weights change: a lost rank ends the run here
        result = step.take_step(self.step_parts, batches, self.counters.global_step)
        self.meter.add(counts, result, learning_rate)
        self._count(result, counts[2])
        self.average.add(self.plan_step)
        self.meter.clock.end_step(counts[1])
        self._send("on_step_end")
        self._after_step(epoch_ends=self._end_epoch())

    @record_function("whet::data")
    def _next_batches(self) -> list[Batch]:
        with self.meter.clock.of("data"):
            return [batch.to(self.run.device) for batch in self.loader.take(self.plan_step)]

    def _between_batches(self) -> None:
        self._send("on_substep_end")
        self.safe_points.check()

    def _count(self, result: step.StepResult, n_computed: int) -> None:
        """Count the step; raise NonFiniteError after too many consecutive steps that were not applied."""
        if result.applied and self.meter.n_steps - self.meter.n_skipped == 1:  # the optimizer has its state only now
            logger.info("%s", formats.describe(self.run.model, self.precision.current, self.optimizer))
        self.counters.total_flos += self.flos_per_token * n_computed
        self.counters.global_step += 1
        if self.meter.n_steps == 1:
            stop.mark_step_done()
        self.counters.epoch = self.loader.epochs_done(self.plan_step)
        if not result.applied or self.spikes.n_bad_in_a_row:
            self.spikes.require_progress(result, self.counters.global_step, self.run.args.max_nonfinite_steps)
        if self.meter.n_steps == 1 and self._overwrites:  # until now the run could have been refused
            if self.sync.place.is_first:
                write.remove_all(self.run.output_dir)
            self.sync.wait()  # for a slow disk

    # ---- between two steps ----

    def _end_epoch(self) -> bool:
        """Return whether this step ends an epoch: the last of the epoch or of the run, or ended by a callback."""
        if self.sync.stop_early(self.events.control.should_epoch_stop):
            self.loader.skip_epoch(self.plan_step)
        ends = self.loader.at_epoch(self.plan_step) or self.finished
        if ends:
            self._send("on_epoch_end")
        return ends

    def _after_step(self, *, epoch_ends: bool) -> None:
        """Log, evaluate and save, in this order: a checkpoint holds everything that is known after its step."""
        done = self.counters.global_step
        first = done == 1 and self.run.args.logging_first_step
        if self.run.plan.log.due(done, epoch_ends) or self.events.control.should_log or first:
            self._log()
        self._evaluate_and_save(epoch_ends=epoch_ends)

    def _evaluate_and_save(self, *, epoch_ends: bool) -> None:
        control, plan, done = self.events.control, self.run.plan, self.counters.global_step
        complete, better = self.plan_step >= plan.n_steps, False
        last = complete and plan.evaluate.strategy == "steps" and done >= plan.evaluate.begins
        if self.sync.evaluate_now(plan.evaluate.due(done, epoch_ends) or control.should_evaluate or last):
            with self.meter.clock.of("saving", n_times=0):
                self.saver.wait()
            due = {"epoch_ends": epoch_ends, "evaluate": control.should_evaluate, "save": control.should_save}
            metrics = self._evaluate(due)
            schedule.after_evaluation(self.scheduler, self.run.args, metrics)
            better = self._is_best(metrics)
        save = self.saver.due(done, epoch_ends=epoch_ends, complete=complete, better=better)
        if self.sync.save_now(save or self.events.control.should_save):
            with self.meter.clock.of("saving"):
                self.saver.save(done, better=better)

    def _ahead(self) -> Ahead:
        """Return what is left of the run, for the time that it will take."""
        plan, done, rows = self.run.plan, self.plan_step, self.run.eval_dataset
        intervals = {"evaluation": plan.evaluate, "saving": plan.save}
        return Ahead(
            n_steps=max(plan.n_steps - done, 0),
            n_tokens=self.loader.tokens_ahead(done),
            pauses={kind: interval.times_left(done, plan.n_steps) for kind, interval in intervals.items()},
            forward_tokens={"evaluation": float(rows.cu_seqlens[-1])} if isinstance(rows, RowStore) else {},
        )

    def _is_best(self, metrics: dict[str, float]) -> bool:
        better = self.sync.is_best(best.is_better(self.run.args, self.counters, metrics))
        if better:
            best.remember(self.run.args, self.counters, metrics)
        return better

    def _do_pending(self) -> None:
        """Do what was still due at the step of the checkpoint."""
        due = self.safe_points.take_pending()
        if not due:
            return
        control = self.events.control
        control.should_training_stop = due.get("stop", False)
        if "epoch_ends" in due:
            control.should_evaluate, control.should_save = due["evaluate"], due["save"]
            self._evaluate_and_save(epoch_ends=due["epoch_ends"])

    def _evaluate(self, due: dict[str, bool]) -> dict[str, float]:
        """Evaluate; after a signal `due` is done when resuming."""
        try:
            with self.meter.clock.of("evaluation"):
                return self.sync.of_first(self.outside.evaluate(), schema.json_object)
        except stop.Stopped:
            self.safe_points.stop_in_evaluation(due)
        except LostRankError:
            self.safe_points.pending = due
            raise

    def _log(self) -> None:
        meter = self.meter
        figures = {**meter.take_losses(), "grad_norm": meter.grad_norm, "learning_rate": meter.learning_rate}
        self.outside.log(figures)

    # ---- after the last step ----

    def _finish(self) -> TrainOutput:
        meter, totals = self.meter, self.meter.totals
        metrics = (
            speed("train_", max(totals.elapsed_s, 1e-9), totals.n_rows, totals.n_steps)
            | {
                "train_tokens_per_second": round(totals.tokens_per_s, 1),
                "train_padding_avoided": round(meter.padding_avoided_frac, 4),
                "total_flos": self.counters.total_flos,
                "train_loss": meter.mean_loss,
            }
            | ({"train_steps_not_applied": meter.n_skipped} if meter.n_skipped else {})
        )
        self.outside.log(dict(metrics))
        return TrainOutput(self.counters.global_step, meter.mean_loss, metrics | {"epoch": self.counters.epoch or 0.0})

    def _close(self) -> None:
        """Release what the run holds, and the gradients of an interrupted step.

        The parts refer to the loop: without it, model and optimizer are freed with the engine, not when Python looks
        for cycles.
        """
        self.loader.close()
        left = self._ahead()
        self.meter.clock.ahead = lambda: left
        if self.in_backward is not None:
            self.in_backward.remove()
        self.run.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.saver.close()
        for part in ("saver", "run_state", "safe_points", "step_parts"):
            vars(self).pop(part, None)

    def _send(self, event: str, **more: Any) -> None:
        facts = more | {"meter": self.meter, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        self.events.send(event, self.counters, **facts)


def _sharing_of(run: Run, optimizer: Optimizer) -> Sharing:
    """Return how the ranks of this run share what it holds, as `zero_stage`, `offload` or DeepSpeed's file says."""
    require_own_state(optimizer)
    if not stage_of_run(run.args) and run.args.deepspeed is None and run.args.offload == "none":
        return Sharing()
    from whet.engine import zero

    return zero.build(run, optimizer)


def _routing_of(run: Run) -> step.Routing:
    """Return the routing of the run; smoothed labels have none, where a model with a balance loss is refused."""
    if settings_of(getattr(unwrapped(run.model), "config", None)) is None:
        return step.Routing()
    from whet.engine.own_losses import SmoothedLoss
    from whet.engine.routing import routing_of

    return step.Routing() if isinstance(run.objective, SmoothedLoss) else routing_of(run.model)


def _trunk_of(run: Run) -> step.StepTrunk:
    """Return what runs the frozen layers."""
    if not run.args.cache_frozen_trunk:
        return step.StepTrunk()
    from whet.engine.frozen_trunk import trunk_of

    return trunk_of(run)


def _wait_for_the_trial() -> None:
    """Ranks try batch sizes at their own pace, so they cannot agree on a signal before all are done."""
