"""The loop of a training run: steps, and what happens between them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from whet.errors import ConfigError, NonFiniteError
from whet.log import logger
from whet.optim import registry, schedule
from whet.train import checkpoint, plan, step, weights
from whet.train.meter import Meter, speed

if TYPE_CHECKING:
    from whet.train.trainer import Trainer

MAX_NONFINITE_STEPS = 3
_STATE = "trainer_state.json"


class Fit:
    """One run of a Trainer, from the first step, or from a checkpoint, to the last."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.plan = plan.make(self.args, len(trainer.train_dataset))
        self.optimizer = trainer.optimizer or registry.build(trainer.model, self.args)
        self.scheduler = trainer.lr_scheduler or schedule.build(self.optimizer, self.args, self.plan.n_steps)
        self.parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        self.meter = Meter()
        self.n_bad_in_a_row = 0
        trainer.optimizer, trainer.lr_scheduler = self.optimizer, self.scheduler

    @property
    def state(self) -> TrainerState:
        """The counters, in transformers' form."""
        return self.trainer.state

    def run(self, resume: str | bool | None) -> TrainOutput:
        """Run the steps that are left; return the last step, the mean loss and the figures."""
        self._begin(resume)
        self._send("on_train_begin")
        try:
            while self.state.global_step < self.plan.n_steps and not self.trainer.events.control.should_training_stop:
                self._one_step()
        finally:
            self._send("on_train_end")
        self._load_best()
        return self._finish()

    def _begin(self, resume: str | bool | None) -> None:
        state = self.state
        state.max_steps, state.num_train_epochs = self.plan.n_steps, self.plan.n_epochs
        state.logging_steps = self.plan.log_every or 0
        state.eval_steps, state.save_steps = self.plan.eval_every or 0, self.plan.save_every or 0
        state.global_step, state.epoch = 0, 0.0
        folder = self._resume_from(resume)
        if folder is not None:
            self._restore(folder)
        self.trainer.model.train()
        if self.args.eval_on_start:
            self._evaluate()

    def _one_step(self) -> None:
        order, done = self.plan.order, self.state.global_step
        if done % order.steps_per_epoch == 0:
            self._send("on_epoch_begin")
        self._send("on_step_begin")
        rows = order.rows(done)
        size = self.args.per_device_train_batch_size
        micro_batches = [
            self.trainer.objective.batch(self.trainer.train_dataset, rows[i : i + size], i).to(self.trainer.device)
            for i in range(0, len(rows), size)
        ]
        loss = step.gradients(
            self.trainer.objective, micro_batches, self.trainer.precision, seed=self.args.seed, step=done
        )
        rate = self.optimizer.param_groups[0]["lr"]
        result = step.update(self.parameters, self.optimizer, loss, self.args.max_grad_norm)
        self.scheduler.step()
        self.meter.add(micro_batches, result, rate)
        self.state.global_step = done + 1
        self.state.epoch = order.epoch(done + 1)
        self._watch(result)
        self._send("on_step_end")
        if (done + 1) % order.steps_per_epoch == 0:
            self._send("on_epoch_end")
        self._between_steps(done + 1)

    def _watch(self, result: step.StepResult) -> None:
        """Stop after several non-finite steps in a row; none of them was applied."""
        self.n_bad_in_a_row = 0 if result.applied else self.n_bad_in_a_row + 1
        if not result.applied:
            logger.warning(
                "step %d was not applied: loss %s, gradient norm %s",
                self.state.global_step, result.loss, result.grad_norm,
            )  # fmt: skip
        if self.n_bad_in_a_row >= MAX_NONFINITE_STEPS:
            raise NonFiniteError(
                what=f"{self.n_bad_in_a_row} steps in a row were not finite",
                got=f"loss {result.loss}, gradient norm {result.grad_norm} at step {self.state.global_step}",
                why="the weights would turn to NaN; they are as the last good step left them",
                fix="lower --learning_rate, raise --warmup_steps, or look at the rows of these steps",
            )

    def _between_steps(self, done: int) -> None:
        control, ended = self.trainer.events.control, done == self.plan.n_steps
        if (
            self.plan.due(self.plan.log_every, done)
            or control.should_log
            or (done == 1 and self.args.logging_first_step)
        ):
            self._log()
        last_epoch_ends = ended and self.args.eval_strategy == "epoch"
        evaluated = None
        if self.plan.due(self.plan.eval_every, done) or control.should_evaluate or last_epoch_ends:
            evaluated = self._evaluate()
        self._save_if_due(done, better=evaluated is not None and self._is_better(evaluated), ended=ended)

    def _save_if_due(self, done: int, *, better: bool, ended: bool) -> None:
        strategy = self.args.save_strategy
        regular = self.plan.due(self.plan.save_every, done) or (ended and strategy in ("steps", "epoch"))
        if not (better if strategy == "best" else regular) and not self.trainer.events.control.should_save:
            return
        if better:
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / checkpoint.folder_name(done))
        self._save(done)
        checkpoint.rotate(Path(self.args.output_dir), self.args.save_total_limit, self._best_folder())

    def _log(self) -> None:
        self.trainer.log(
            {
                "loss": self.meter.window_loss(),
                "grad_norm": self.meter.grad_norm,
                "learning_rate": self.meter.learning_rate,
            }
        )

    def _evaluate(self) -> dict[str, float]:
        return self.trainer.evaluate()

    def _is_better(self, metrics: dict[str, float]) -> bool:
        """Return whether these metrics beat the best so far, and remember them if so."""
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return False
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            raise unknown_metric(wanted, metrics)
        sign = 1.0 if self.args.greater_is_better else -1.0
        best = self.state.best_metric
        if math.isnan(metrics[name]) or (best is not None and sign * metrics[name] <= sign * best):
            return False
        self.state.best_metric, self.state.best_global_step = metrics[name], self.state.global_step
        return True

    def _best_folder(self) -> Path | None:
        best = self.state.best_model_checkpoint
        return Path(best) if best and self.args.load_best_model_at_end else None

    def _save(self, done: int) -> None:
        def write(folder: Path) -> None:
            self.trainer.save_model(str(folder))
            weights.save_optimizer(self.optimizer, folder)
            meter = {"loss_total": self.meter.loss_total, "n_losses": self.meter.n_losses}
            (folder / "meter.json").write_text(json.dumps(meter), "utf-8")
            self.state.save_to_json(str(folder / _STATE))

        folder = checkpoint.save(Path(self.args.output_dir), done, write, {"world_size": 1})
        logger.info("saved %s", folder)
        self._send("on_save")

    def _resume_from(self, resume: str | bool | None) -> Path | None:
        if not resume or resume == "no":
            return None
        if resume is True or resume == "auto":
            return checkpoint.newest(Path(self.args.output_dir))
        return checkpoint.require_good(Path(str(resume)))

    def _restore(self, folder: Path) -> None:
        """Put back weights, optimizer, schedule and counters; data order and masks follow from the step's number."""
        weights.load_weights(self.trainer.model, folder)
        weights.load_optimizer(self.optimizer, folder)
        kept = TrainerState.load_from_json(str(folder / _STATE))
        for name in ("global_step", "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(self.state, name, getattr(kept, name))
        meter = json.loads((folder / "meter.json").read_text("utf-8"))
        self.meter.loss_total, self.meter.n_losses = meter["loss_total"], meter["n_losses"]
        self.scheduler.last_epoch = self.state.global_step - 1
        self.scheduler.step()
        logger.info("resuming after step %d from %s", self.state.global_step, folder)

    def _load_best(self) -> None:
        best = self._best_folder()
        if best is not None:
            weights.load_weights(self.trainer.model, checkpoint.require_good(best))
            logger.info("loaded the best model (%s %.4f) from %s",
                        self.args.metric_for_best_model, self.state.best_metric, best)  # fmt: skip

    def _finish(self) -> TrainOutput:
        meter, seconds = self.meter, self.meter.elapsed_s
        metrics = speed("train_", seconds, meter.n_rows, meter.n_steps) | {
            "train_tokens_per_second": round(meter.tokens_per_s, 1),
            "train_padding_avoided": round(meter.padding_avoided_frac, 4),
            "total_flos": self.state.total_flos,
            "train_loss": meter.mean_loss,
        }
        self.trainer.log(metrics)
        return TrainOutput(self.state.global_step, meter.mean_loss, metrics | {"epoch": self.state.epoch or 0.0})

    def _send(self, event: str, **facts: Any) -> None:
        self.trainer.events.send(
            event, self.state, meter=self.meter, optimizer=self.optimizer, lr_scheduler=self.scheduler, **facts
        )


def unknown_metric(wanted: str, metrics: dict[str, float]) -> Exception:
    """Return the error for a metric that no evaluation gives."""
    return ConfigError(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"this evaluation gives {', '.join(sorted(metrics))}",
        fix="name one of these in --metric_for_best_model (with or without eval_)",
    )
