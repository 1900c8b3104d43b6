"""What ranks do in the tests: each function gets its job and the rank, and returns what is compared."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ends_of_ranks import AllDie, AllStop, die_in_save
from tiny_runs import Toy, toy_rows
from transformers import TrainerCallback

import engine
from tiny import tiny_model, tiny_rows
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.engine.description import planned_bytes
from whet.models.experts.settings import ExpertSettings
from whet.models.experts.upcycle import upcycle
from whet.watch import stop

_USUAL: dict[str, Any] = {
    "learning_rate": 1e-2, "max_steps": 6, "logging_steps": 1, "save_strategy": "no", "precision": "fp32",
    "report_to": [], "ddp_timeout": 20,
}  # fmt: skip


def arguments(job: dict[str, Any]) -> engine.TrainingArguments:
    given = _USUAL | {"output_dir": str(Path(job["folder"]).parent / "out")} | job.get("args", {})
    rows = given.pop("rows_per_step", 8) // job["n_ranks"] // given.get("gradient_accumulation_steps", 1)
    return engine.TrainingArguments(**({"per_device_train_batch_size": job.get("rows", rows)} | given))


def left_by(trainer: engine.Trainer, **more: Any) -> dict[str, Any]:
    """Return what a run left in this rank."""
    held = trainer.model.state_dict()
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in held.values())).hexdigest()
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "parts": {name: [entry[name] for entry in history if name in entry]
                  for name in ("task_loss", "moe_balance_loss", "moe_z_loss", "moe_dropped")},
        "steps": trainer.state.global_step,
        "rows": next((entry["train_samples_per_second"] * entry["train_runtime"] for entry in history
                      if "train_runtime" in entry), None),
        "digest": digest,
    } | more  # fmt: skip


def _questions(job: dict[str, Any]) -> engine.Trainer:
    rows = tiny_rows(job.get("n_rows", 20), job.get("family", "bert"))
    model = tiny_model(job.get("family", "bert"), dropout=job.get("dropout", 0.1))
    if "experts" in job:
        upcycle(model, ExpertSettings(**job["experts"]))
    return engine.Trainer(model, arguments(job), train_dataset=rows, eval_dataset=rows)


def questions(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a packed question answering model, and evaluate it."""
    trainer = _questions(job)
    if job.get("all_die_at") is not None:
        trainer.events.add_callback(AllDie(job["all_die_at"]))
    if job.get("all_stop_at") is not None:
        trainer.events.add_callback(AllStop(job["all_stop_at"]))
    trainer.train(resume_from_checkpoint=job.get("resume"))
    counts = {name: value for name, value in trainer.evaluate().items() if name in ("eval_loss",)}
    predicted = trainer.predict(trainer.eval_dataset)
    return left_by(trainer, evaluated=counts, predicted=[np.asarray(one).shape for one in predicted.predictions])


class _Weighs(TrainerCallback):
    """Counts the bytes of the optimizer's state, and of all tensors of this rank just before an update."""

    state_bytes = tensor_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gc.collect()
        found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and type(one).__name__ != "DTensor"]
        found += [one.grad for one in found if one.is_leaf and one.grad is not None]
        memories = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
        self.tensor_bytes = sum(memories.values())

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        held = (value for values in optimizer.state.values() for value in values.values())
        self.state_bytes = sum(one.numel() * one.element_size() for one in held if isinstance(one, torch.Tensor))


def shared(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a packed model whose optimizer, gradients or weights the ranks share; count what this rank holds."""
    trainer, scale = _questions(job), _Weighs()
    trainer.events.add_callback(scale)
    if job.get("all_die_at") is not None:
        trainer.events.add_callback(AllDie(job["all_die_at"]))
    trainer.train(resume_from_checkpoint=job.get("resume"))
    plan = planned_bytes(trainer.model, trainer.args, trainer.optimizer, trainer.sync.place)
    total = plan.weights + plan.gradients + (plan.state or 0)
    found = {"state": [scale.state_bytes, plan.state], "total": [scale.tensor_bytes, total]}
    return left_by(trainer, **found, evaluated=trainer.evaluate()["eval_loss"])


def words(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a decoder, whose loss reads its head without a call of the model."""
    rows: Any = token_rows(20)
    trainer = engine.Trainer(tiny_decoder("llama"), arguments(job), data_collator=collate, train_dataset=rows)
    trainer.train()
    return left_by(trainer)


def toy(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a module that returns the mean loss of its rows."""
    rows: Any = toy_rows(job.get("n_rows", 32))
    callbacks = [_CALLBACKS[name](rank) for name in job.get("callbacks", ())]
    metrics = {"compute_metrics": lambda found: {"sum": float(np.sum(found.predictions))}}
    trainer = engine.Trainer(
        Toy(), arguments(job), train_dataset=rows, eval_dataset=toy_rows(11), callbacks=callbacks, **metrics
    )
    if job.get("infinite_at") is not None:
        trainer.events.add_callback(_InfiniteLoss(rank, job["infinite_at"]))
    if job.get("signal_at") is not None:
        trainer.events.add_callback(_Signal(rank, job["signal_at"]))
    if job.get("nan_at") is not None:
        trainer.events.add_callback(_Poison(rank, job["nan_at"], trainer))
    if job.get("shortage_at") is not None and rank == 1:
        _run_out_of_memory(job["shortage_at"], trainer)
    if job.get("dies_in_forward") is not None:
        _die_in_forward(rank, job["dies_in_forward"], trainer)
    if job.get("dies_in_save") is not None:
        die_in_save(rank, job["dies_in_save"], Path(trainer.args.output_dir))
    for name, cls_of in (("dies_at", _Dies), ("hangs_at", _Hangs)):
        if job.get(name) is not None:
            trainer.events.add_callback(cls_of(rank, job[name]))
    try:
        trainer.train(resume_from_checkpoint=job.get("resume"))
    except stop.Stopped as stopped:
        return left_by(trainer, stopped=str(stopped))
    return left_by(trainer, evaluated=trainer.evaluate(), events=[getattr(one, "seen", None) for one in callbacks])


class _On(TrainerCallback):
    """Does something on rank 1 alone, after step 3."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.rank == 1 and state.global_step == 3:
            self.act(control)

    def act(self, control: Any) -> None:
        raise NotImplementedError

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(["evaluate", state.global_step])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(["save", state.global_step])


class _Stops(_On):
    def act(self, control: Any) -> None:
        control.should_training_stop = True


class _Evaluates(_On):
    def act(self, control: Any) -> None:
        control.should_evaluate = True


class _Saves(_On):
    def act(self, control: Any) -> None:
        control.should_save = True


class _EndsEpoch(_On):
    def act(self, control: Any) -> None:
        control.should_epoch_stop = True


class _ChangesWeight(_On):
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if self.rank == 1 and state.global_step == 2:
            with torch.no_grad():
                for one in model.parameters():
                    one.mul_(1.01)


class _Fails(_On):
    def act(self, control: Any) -> None:
        raise ValueError("the callback of rank 1 fails")


_CALLBACKS = {"stops": _Stops, "evaluates": _Evaluates, "saves": _Saves, "fails": _Fails, "ends_epoch": _EndsEpoch,
              "changes_weight": _ChangesWeight}  # fmt: skip


class _Signal(TrainerCallback):
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.rank == 1 and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class _Dies(_Signal):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.rank == 1 and state.global_step == self.step:
            os._exit(9)


class _Hangs(_Signal):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            Path(args.output_dir).with_name("hung").write_text(str(time.time()), "utf-8")
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)


def _die_in_forward(rank: int, step: int, trainer: engine.Trainer) -> None:
    """End rank 1 while the other one computes gradients."""

    def end(*_: Any) -> None:
        if rank == 1 and trainer.state.global_step == step and trainer.model.training:
            os._exit(9)

    trainer.model.register_forward_hook(end)


class _InfiniteLoss(TrainerCallback):
    """Makes the loss of rank 1 infinite in one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.hook = rank, step, None

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if self.rank == 1 and state.global_step == self.step:
            self.hook = model.register_forward_hook(lambda *given: given[2] | {"loss": given[2]["loss"] * float("inf")})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class _Poison(TrainerCallback):
    """Makes the gradient of rank 1 infinite in one step, after its last micro-batch."""

    def __init__(self, rank: int, step: int, trainer: engine.Trainer) -> None:
        self.rank, self.step, self.hook = rank, step, None
        self.parameter = next(trainer.model.parameters())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.rank == 1 and state.global_step == self.step:
            self.hook = self.parameter.register_hook(lambda gradient: gradient * float("inf"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


def _run_out_of_memory(step: int, trainer: engine.Trainer) -> None:
    """Let this rank find too little memory at a step."""
    from whet.watch import guard

    found = guard.MemoryGuard.shortage
    guard.MemoryGuard.shortage = lambda self: "too little left" if trainer.state.global_step == step else found(self)


def writes(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train with everything that writes files switched on, in the working folder of the rank."""
    trainer = _questions(job)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"a": 1.0})
    return left_by(trainer, saves=trainer.args.should_save)
