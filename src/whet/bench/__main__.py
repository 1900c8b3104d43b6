"""One run of one technique, in a process of its own: `python -m whet.bench RESULT`, the settings on stdin."""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from whet import __version__, log, system
from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, WhetError
from whet.hardware import memory, trim
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.task import TASK


class StepClock:
    """A callback that records when each step ended, and its loss."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.ended_s.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended_s.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if "loss" in facts["logs"]:
            self.losses.append(float(facts["logs"]["loss"]))

    def step_s(self, warmup: int) -> list[float]:
        """Return the seconds of each step after the warm-up: batch, step, and the loop's work between steps."""
        return [end - start for start, end in zip(self.ended_s[warmup:-1], self.ended_s[warmup + 1 :], strict=True)]


def main() -> None:
    """Run the settings from stdin; write the measurements, or the error, to the file named on the command line."""
    log.set_up()
    try:
        told = measure(json.load(sys.stdin))
    except WhetError as error:
        problem = error.problems[0]
        told = {"error": problem.what, "why": problem.why, "refused": isinstance(error, ConfigError)}
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    Path(sys.argv[1]).write_text(json.dumps(told), "utf-8")


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Return times, memory and losses of one run with the settings `qa` and `args`."""
    qa, args = QaArguments(**asked["qa"]), TrainingArguments(**asked["args"])
    examples = {"train": TASK.examples(qa, "train")}
    held_bytes = memory.resident_bytes() or 0
    engine, clock = TASK.begin(qa, args, examples).engine, StepClock()
    engine.events.add_callback(clock)
    exact = _forget_peak()
    engine.train()
    n_steps = len(clock.ended_s) - 1
    return {
        "step_s": clock.step_s(asked["warmup"]),
        "losses": clock.losses,
        "n_steps": n_steps,
        "precision": engine.precision.name,
        "peak_bytes": _peak_bytes(engine.device, held_bytes),
        "peak_exact": exact,
        "facts": _facts(engine.device),
    }


def _forget_peak() -> bool:
    """Return whether the peak so far, which cutting the data into rows may have set, could be reset."""
    if trim.why_not() is None:
        trim.trim()()
    system.forget_peak()
    held, peak = memory.resident_bytes(), memory.peak_bytes()
    # A peak close to the memory held now does not hide the peak of the run.
    return held is not None and peak is not None and peak - held < 32 * 2**20


def _peak_bytes(device: torch.device, held_bytes: int) -> int | None:
    """Return the peak memory of model and training: the GPU's, or this process's minus what it held before."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = memory.peak_bytes()
    return None if peak is None else peak - held_bytes


def _facts(device: torch.device) -> dict[str, Any]:
    return {
        "whet": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


if __name__ == "__main__":
    main()
