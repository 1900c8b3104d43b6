"""What ranks that share state or weights are refused: each function gets its job and the rank."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs_of_ranks
import torch
from tiny_runs import Toy, toy_rows
from torch import nn
from transformers import TrainerCallback

import engine
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.cli.main import run
from whet.dist.sharded_model import ShardedModel
from whet.engine import zero as share
from whet.store import snapshot, weights


class _CommonStep(torch.optim.SGD):
    """Takes its step size from the gradients of all parameters, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        for group in self.param_groups:
            group["lr"] = 1e-2 / float(1 + sum(one.norm() for one in gradients))
        return super().step(closure)


class _Hooks(TrainerCallback):
    """Halves the gradient of the weights that have one row: rank 1 has nothing of them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        for one in model.parameters():
            if len(one) == 1:
                one.register_hook(lambda gradient: gradient / 2)


class _Appends(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))


def refusals(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the text of each refusal; all of them come on both ranks at the same time."""
    hooked = _trainer(job, 3, _Hooks())
    found = {"hook": _text(hooked.train)}
    out = str(Path(job["folder"]) / f"saved-{rank}")
    later: dict[str, Callable[[], Any]] = {
        "evaluate": hooked.evaluate, "save": lambda: hooked.save_model(out), "train again": hooked.train,
    }  # fmt: skip
    found |= {name: _text(call) for name, call in later.items()}
    found["appended"] = _text(_trainer(job, 1, _Appends()).train)
    model = Toy()
    own: dict[str, Any] = {"optimizers": (_CommonStep(model.parameters(), lr=1e-2), None)}
    found["optimizer"] = _text(_trainer(job, 1, model=model, **own).train)
    for stage in (1, 3):
        found[f"shared memory {stage}"] = _text(_trainer(job, stage, model=_overlapping()).train)
    trainer, sys.byteorder = _trainer(job, 1), "big"
    found["big-endian"] = _text(trainer.train)
    sys.byteorder = "little"
    return found


def command(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a command of whet as one of its ranks."""
    return {"code": run(job["words"])}


def unread(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train low-rank pairs, one of them next to a layer that the loss does not read."""
    import peft

    model = tiny_decoder("llama")
    model.model.unread = nn.Linear(4, 4)
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "unread"], r=2))
    args = engine.TrainingArguments(
        output_dir=str(Path(job["folder"]).parent / "out"), max_steps=2, per_device_train_batch_size=4,
        save_strategy="no", precision="fp32", report_to=[], ddp_timeout=20, **job["args"],
    )  # fmt: skip
    rows: Any = token_rows(16)
    engine.Trainer(wrapped, args, collate, rows).train()
    return {}


def dies_in_collect(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as `toy` does; rank 1 ends in the second save, before rank 0 has its rows."""
    real, count = ShardedModel._collect, 0

    def collect(self: ShardedModel, *, everywhere: bool) -> None:
        nonlocal count
        count += not everywhere
        if rank == 1 and count == 2:
            os._exit(9)
        real(self, everywhere=everywhere)

    ShardedModel._collect = collect
    return jobs_of_ranks.toy(job, rank)


def dies_once_sent(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as `toy` does; rank 1 ends in the second save, when rank 0 has all of its state."""
    real, count = snapshot.exhaust, 0

    def exhaust(pieces: Any) -> None:
        nonlocal count
        real(pieces)
        count += 1
        if rank == 1 and count == 2:
            os._exit(9)

    snapshot.exhaust = exhaust
    return jobs_of_ranks.toy(job, rank)


def slow_disk(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as `toy` does; before and after rank 0 writes the state, and reads the best weights, it waits.

    That takes longer than an exchange may take.
    """

    def slowly(real: Any) -> Any:
        def slow(*given: Any) -> None:
            time.sleep(job["slow_s"])
            real(*given)
            time.sleep(job["slow_s"])

        return slow

    snapshot.write_pieces, weights.load_weights = slowly(snapshot.write_pieces), slowly(weights.load_weights)
    return jobs_of_ranks.toy(job, rank)


def interrupted_in_save(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as `toy` does; Ctrl-C ends rank 1 in a save before it sends anything, and comes to rank 0 as it writes."""

    def end(*_: Any) -> None:
        os._exit(9)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if rank == 1:
        snapshot.exhaust = end
    snapshot.write_pieces = interrupt
    try:
        return jobs_of_ranks.toy(job, rank)
    except KeyboardInterrupt as error:
        return {"error": type(error).__name__}


class _Wide(Toy):
    """A Toy with as many hidden units as wanted."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(4, units), nn.LayerNorm(units), nn.Linear(units, 1)


class _FullDisk(TrainerCallback):
    """Lets no file of this process grow beyond a limit after step 2, as a full disk does, until step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        limit = {2: 100_000, 3: resource.RLIM_INFINITY}.get(state.global_step)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def full_disk(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train; the disk is full for rank 0 while it writes the first checkpoint, whose state is larger than the limit."""
    rows: Any = toy_rows(32)
    callbacks = [_FullDisk()] if rank == 0 else []
    model = _Wide(units=4096)
    trainer = engine.Trainer(model, jobs_of_ranks.arguments(job), train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return jobs_of_ranks.left_by(trainer)


def weighed(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a model of 48 million weights, and save it; return the most memory that this process held, in bytes."""
    rows: Any = toy_rows(16)
    engine.Trainer(_Wide(units=6_000_000), jobs_of_ranks.arguments(job), train_dataset=rows).train()
    return {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def offloaded(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as `questions` does, with the calls of an offload from a GPU: on a CPU they move nothing."""
    share._offloads = lambda *_, **__: True
    return jobs_of_ranks.questions(job, rank)


def _overlapping() -> Toy:
    """Return a model with two parameters over the same memory."""
    model = Toy()
    model.norm.bias = nn.Parameter(model.norm.weight.data[:8])
    return model


def _trainer(
    job: dict[str, Any],
    stage: int,
    *callbacks: Any,
    model: Any = None,
    **more: Any,
) -> engine.Trainer:
    args = engine.TrainingArguments(
        output_dir=str(Path(job["folder"]).parent / "out"), zero_stage=stage, max_steps=3, learning_rate=1e-2,
        per_device_train_batch_size=4, save_strategy="no", precision="fp32", report_to=[], ddp_timeout=20,
    )  # fmt: skip
    rows: Any = toy_rows(16)
    return engine.Trainer(
        model or Toy(), args, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), **more
    )


def _text(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
