"""Tiny runs whose whole outcome is kept, to see what a setting changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_runs import tiny_bert
from torch import nn
from transformers import TrainerCallback

import engine
import whet
from whet.watch.stop import Stopped

N_ROWS = 10
_LENGTHS = 6, 9
"""Two lengths of rows, in turn, unless the run is padded, for which nobody says how."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting that counts: `given` over `base` changes what is seen in `sees`."""

    given: Mapping[str, Any]
    sees: str
    base: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] | None = None
    """Settings of an earlier run in the same folder."""
    signal: bool = False
    """Whether SIGUSR1 comes after the first step."""
    bad_disk: bool = False
    """Whether a part of each checkpoint cannot be written."""


class Watch(TrainerCallback):
    """Writes down what the loop does."""

    def __init__(self, signals: bool) -> None:
        self.events: list[tuple[str, int]] = []
        self.gradients: list[int] = []
        self._signals = signals

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step", state.global_step))

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("batch", state.global_step))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.gradients.append(sum(weight.grad is not None for weight in model.parameters()))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._signals and state.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class Processing:
    """Stands where a tokenizer does: tells which thread writes it, or cannot be written."""

    def __init__(self, bad_disk: bool) -> None:
        self.bad_disk = bad_disk

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        if self.bad_disk and "checkpoint" in str(folder):
            raise OSError("this disk refuses")


def rows_of(n: int, *, of_one_length: bool) -> list[dict[str, Any]]:
    """Rows of tokens with an answer in each."""
    numbers = torch.Generator().manual_seed(11)
    lengths = [_LENGTHS[0] if of_one_length else _LENGTHS[row % 2] for row in range(n)]
    return [
        {"input_ids": torch.randint(5, 50, (length,), generator=numbers).tolist(),
         "start_positions": row % length, "end_positions": length - 1}
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def outcome(folder: Path, case: Case, *, changed: bool) -> dict[str, Any]:
    """What a run of the case's settings leaves and shows, by aspect; `changed` says whether `given` is among them."""
    if case.after is not None:
        _run(folder, case.after, case)
    return _run(folder, {**case.base, **(case.given if changed else {})}, case)


def _run(folder: Path, given: Mapping[str, Any], case: Case) -> dict[str, Any]:
    usual = {
        "output_dir": folder / "out", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "num_train_epochs": 1, "save_strategy": "no", "logging_steps": 1, "use_cpu": True,
        "train_sampling_strategy": "sequential", "precision": "fp32",
    }  # fmt: skip
    settings = {name: value for name, value in {**usual, **given}.items() if value is not ...}
    settings = {name: str(value).replace("{folder}", str(folder)) if isinstance(value, str | Path) else value
                for name, value in settings.items()}  # fmt: skip
    seen: dict[str, Any] = {"error": None}
    watch, lines = Watch(case.signal), _Lines()
    logger = logging.getLogger("whet")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nobody listens, unless the run does
    try:
        with _threads() as threads:
            seen |= _train(settings, watch, case)
        seen["threads"] = threads
    except (whet.WhetError, Stopped) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGUSR1, before)
        logger.removeHandler(lines)
        logger.setLevel(level)
    seen |= {"events": watch.events, "gradients": watch.gradients, "messages": lines.texts}
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return seen | {"files": [re.sub(r"tfevents\..*", "tfevents", name) for name in files]}


def _train(settings: dict[str, Any], watch: Watch, case: Case) -> dict[str, Any]:
    args = engine.TrainingArguments(**settings)
    rows = rows_of(N_ROWS, of_one_length=args.attn_implementation not in (None, "whet"))
    kept = _Kept()
    scores = iter(range(100))
    trainer = engine.Trainer(
        model=tiny_bert(), args=args, train_dataset=rows, eval_dataset=rows[:6], callbacks=[watch],
        processing_class=Processing(case.bad_disk) if case.bad_disk else None,
        compute_metrics=lambda _: {"score": float(next(scores))},
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        trainer.train()
    history = trainer.state.log_history
    evaluations = [entry for entry in history if "eval_loss" in entry]
    return {
        "losses": [(entry["step"], entry["loss"]) for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "steps": trainer.state.global_step,
        "weights": _digest(trainer.model),
        "device": trainer.device.type,
        "kept_bytes": kept.n_bytes,
        "best": Path(trainer.state.best_model_checkpoint or "none").name,
        "eval_batches": [_batches(entry) for entry in evaluations],
    }


class _Kept:
    """Counts the bytes that forward keeps for backward."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.n_bytes += tensor.nbytes
        return tensor


@contextmanager
def _threads() -> Iterator[set[str]]:
    """The first words of the names of whet's threads that begin within the block."""
    names: set[str] = set()

    def note(*_: Any) -> None:
        name = threading.current_thread().name
        if name.startswith("whet"):
            names.add(name.rstrip("0123456789"))
        sys.setprofile(None)  # once a thread is enough

    threading.setprofile(note)
    try:
        yield names
    finally:
        threading.setprofile(None)


class _Lines(logging.Handler):
    """Keeps messages with their figures blotted out."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(re.sub(r"[\d.,]+|/\S+", "#", record.getMessage().splitlines()[0]))


def _batches(entry: Mapping[str, float]) -> int:
    """How many batches an evaluation of 6 rows took, from its two speeds."""
    return round(6 * entry["eval_steps_per_second"] / entry["eval_samples_per_second"])


def _digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for weight in model.state_dict().values():
        total.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
