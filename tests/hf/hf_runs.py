"""Short trainings by `whet.Trainer`, in this process or in forked ones that a test may kill."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, TrainerCallback

import whet
from tiny import tiny_config

USUAL: dict[str, Any] = {
    "max_steps": 12, "per_device_train_batch_size": 4, "save_steps": 4, "logging_steps": 1, "learning_rate": 1e-3,
    "disable_tqdm": True, "report_to": "none", "precision": "fp32",
}  # fmt: skip
LONGEST_S = 120.0

Rows = list[dict[str, Any]]


def rows(n_rows: int = 20, *, labelled: bool = True) -> Rows:
    """Return rows of 3 to 20 tokens; the class is whether the first token is in the upper half."""
    numbers = np.random.default_rng(3)
    ids = [numbers.integers(10, 190, numbers.integers(3, 21)).tolist() for _ in range(n_rows)]
    found: Rows = [{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids]
    return [row | {"labels": int(row["input_ids"][0] >= 100)} for row in found] if labelled else found


def pad(given: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the rows as one batch, padded to the longest."""
    longest = max(len(row["input_ids"]) for row in given)
    batch = {
        name: torch.tensor([[*row[name], *[0] * (longest - len(row[name]))] for row in given])
        for name in ("input_ids", "attention_mask")
    }
    return batch | {"labels": torch.tensor([row["labels"] for row in given])} if "labels" in given[0] else batch


def mask_tokens(given: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch for masked words; the masked places are drawn from torch's and numpy's generators."""
    batch = pad(given)
    drawn = torch.rand(batch["input_ids"].shape) < 0.2
    drawn |= torch.from_numpy(np.random.random(batch["input_ids"].shape) < 0.2)
    chosen = drawn & batch["attention_mask"].bool()
    chosen[:, 0] = True
    labels = batch["input_ids"].where(chosen, -100)
    return batch | {"input_ids": batch["input_ids"].masked_fill(chosen, 4), "labels": labels}


def classifier(family: str = "bert", **changes: Any) -> Any:
    """Return a tiny classifier with dropout, the same each time."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(tiny_config(family, dropout=0.1, **changes))


def masked_words() -> Any:
    """Return a tiny model for masked words with dropout, the same each time."""
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(tiny_config("bert", dropout=0.1))


def arguments(folder: Path, **changes: Any) -> whet.TrainingArguments:
    """Return the settings of a training of 12 steps that saves every 4."""
    return whet.TrainingArguments(str(folder), **(USUAL | changes))


class KillAt(TrainerCallback):
    """Ends the process by SIGKILL at an event of a step."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self._kill)

    def _kill(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class SignalAt(TrainerCallback):
    """Sends this process a signal at an event of a step."""

    def __init__(self, event: str, step: int, number: int) -> None:
        self.step, self.number = step, number
        setattr(self, event, self._send)

    def _send(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a saved model or checkpoint."""
    return load_file(folder / "model.safetensors")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether all tensors are bitwise equal."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def forked(act: Callable[[int], Any], folder: Path, n_ranks: int = 1, *, code_of: Any = None) -> list[int]:
    """Call `act(rank)` in a forked process for each rank; return their exit codes, negative for a signal.

    Their output goes to FOLDER/rank-R.txt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            _child(act, folder, rank, n_ranks, port)
        pids.append(pid)
    codes, until = dict.fromkeys(pids), time.monotonic() + LONGEST_S
    if code_of is not None:
        code_of(pids)
    while None in codes.values() and time.monotonic() < until:
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            codes[pid] = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.01)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert None not in codes.values(), [output(folder, rank)[-2000:] for rank in range(n_ranks)]
    return [code for code in codes.values() if code is not None]


def output(folder: Path, rank: int = 0) -> str:
    """Return what a forked process printed."""
    return (folder / f"rank-{rank}.txt").read_text("utf-8")


def _child(act: Callable[[int], Any], folder: Path, rank: int, n_ranks: int, port: int) -> None:
    code = 1
    try:
        handle = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if n_ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        act(rank)
        code = 0
    except SystemExit as ended:
        traceback.print_exc()
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
