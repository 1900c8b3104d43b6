"""Runs of transformers' own Trainer on a tiny model, each in a forked process: what peer.py interrupts and damages."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForQuestionAnswering, Trainer, TrainerCallback, TrainingArguments

N_STEPS, SAVE_STEPS = 24, 3
BEST: dict[str, Any] = {
    "seed": 42, "data_seed": 42, "enable_jit_checkpoint": True, "save_strategy": "steps", "save_steps": SAVE_STEPS,
    "logging_nan_inf_filter": False, "logging_steps": 1,
}  # fmt: skip
"""The settings with which it promises most."""
_LONGEST_S = 120.0


class Rows(torch.utils.data.Dataset):
    """Thirty rows of twelve random tokens."""

    def __init__(self) -> None:
        self.ids = torch.randint(5, 90, (30, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[row], "start_positions": torch.tensor(2), "end_positions": torch.tensor(5)}


class NanAt(TrainerCallback):
    """Makes the loss of one step NaN, by the weight of the loss, and notes the weights after each step."""

    def __init__(self, step: int) -> None:
        self.step, self.finite = step, {}

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.spoiled = state.global_step + 1 == self.step

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.finite[state.global_step] = all(bool(weight.isfinite().all()) for weight in model.parameters())


class Slow(TrainerCallback):
    """Lets a step take a while, so that a run is long enough to be stopped."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.05)


def model() -> nn.Module:
    """Return a new BERT with dropout, the same each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = AutoModelForQuestionAnswering.from_config(AutoConfig.for_model("bert", intermediate_size=32, **sizes))
    made.spoiled = False
    plain = made.forward

    def forward(input_ids: Any = None, start_positions: Any = None, end_positions: Any = None, **more: Any) -> Any:
        output = plain(input_ids=input_ids, start_positions=start_positions, end_positions=end_positions, **more)
        if made.spoiled:
            output.loss = output.loss * float("nan")
        return output

    made.forward = forward
    return made


def trainer(folder: Path, callbacks: Any = (), **changes: Any) -> Trainer:
    """Return a Trainer with the best settings."""
    usual = {"output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": N_STEPS,
             "report_to": "none", "disable_tqdm": True}  # fmt: skip
    args = TrainingArguments(**(usual | BEST | changes))
    return Trainer(model=model(), args=args, train_dataset=Rows(), callbacks=list(callbacks))


def go_on(folder: Path, **changes: Any) -> Trainer:
    """Train, from the newest checkpoint where there is one."""
    made = trainer(folder, **changes)
    made.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(str(folder)))
    return made


def fork(work: Callable[[], Any], log: Path) -> int:
    """Do the work in a child; return its pid."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process lives
        warnings.simplefilter("ignore")
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def wait(child: int) -> int:
    """Return a child's exit code, or minus the signal that ended it."""
    until = time.monotonic() + _LONGEST_S
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
