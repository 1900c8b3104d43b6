"""`--profile`: how the time of a training step is spent, shown once, early in the run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from whet.config.arguments import TrainingArguments
from whet.train.callbacks.operator_groups import GROUPS, group_of_class
from whet.train.callbacks.step_times import STEP, StepTimes

_LEAST_WARM_UP, WARM_UP_STEPS = 2, 12
"""Steps before the profiled ones: the first steps allocate memory and start threads, so they are slower. A short run
has fewer."""
PROFILED_STEPS = 5


def build(args: TrainingArguments) -> list[StepProfile]:
    """Return the callback if it is asked for."""
    return [StepProfile()] if args.profile else []


class StepProfile(TrainerCallback):
    """Profiles a few steps after the warm-up and prints the table; the rest of the run is not affected.

    In a short run fewer steps are profiled; `times` holds the sums. Only the time from on_step_begin to on_step_end
    counts, without evaluations and checkpoints.
    """

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        self.first_step = self.last_step = 0
        self._running: _StepProfiler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        n_left = state.max_steps - state.global_step
        n_warm = min(max(n_left - PROFILED_STEPS, _LEAST_WARM_UP), WARM_UP_STEPS, max(n_left - 1, 0))
        self.first_step = state.global_step + n_warm + 1
        self.last_step = min(self.first_step + PROFILED_STEPS - 1, state.max_steps)
        self.n_warm = n_warm
        self.times = StepTimes(on_gpu=any(parameter.is_cuda for parameter in model.parameters()))

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if self.times is not None and self.first_step <= state.global_step + 1 <= self.last_step:
            self._running = _StepProfiler(model, on_gpu=self.times.on_gpu)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running is not None and self.times is not None:
            running, self._running = self._running, None
            self.times.add(running.stop())
            if state.global_step == self.last_step:
                self._show()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running is not None:  # the step failed
            self._running.stop()
            self._running = None
        if self.times is not None and 0 < self.times.n_steps <= self.last_step - self.first_step:  # stopped early
            self._show()

    def _show(self) -> None:
        assert self.times is not None
        seen = (self.first_step, self.first_step + self.times.n_steps - 1)
        if sys.stdout.isatty():
            _print_table(self.times, seen, self.n_warm)
        else:
            facts = {"steps": seen, "warm_up_steps": self.n_warm} | as_json(self.times)
            sys.stdout.write(json.dumps({"profile": facts}) + "\n")
            sys.stdout.flush()


def as_json(times: StepTimes) -> dict[str, Any]:
    """Return the times of a step as JSON values."""
    return {
        "step_ms": round(times.step_ms, 3),
        "groups": {
            group.replace(" ", "_"): {
                "ms": round(times.ms(group), 3),
                "share": round(times.frac(group), 4),
                "largest": times.largest(group),
            }
            for group in GROUPS
        },
    }


def _print_table(times: StepTimes, seen: tuple[int, int], n_warm: int) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = f"step {seen[0]}" if seen[0] == seen[1] else f"steps {seen[0]} to {seen[1]}"
    table = Table(
        title=f"Where a step's time goes: {steps}, after {n_warm} of warm-up, {times.step_ms:,.1f} ms each",
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    table.add_column("most of it")
    for group in sorted(GROUPS, key=lambda one: (one == "other", -times.ms(one))):
        row = (group, f"{times.ms(group):,.1f}", f"{times.frac(group):.1%}", ", ".join(times.largest(group)))
        table.add_row(*row)
    Console().print(table)


class _StepProfiler:
    """Profiles one step, with a range around the step and around each module whose class has a group."""

    def __init__(self, model: nn.Module, *, on_gpu: bool) -> None:
        self._open: list[record_function] = []
        self._hooks = [hook for name, module in _annotated(model) for hook in self._hook(name, module)]
        self._on_gpu = on_gpu
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities, acc_events=True)
        with _quiet():
            self._profiler.start()
        self._enter(STEP)

    def stop(self) -> Any:
        """Return the events since the beginning."""
        if self._on_gpu:
            torch.cuda.synchronize()
        while self._open:
            self._leave()
        for hook in self._hooks:
            hook.remove()
        self._profiler.stop()
        return self._profiler.events()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        before = module.register_forward_pre_hook(lambda *_: self._enter(name))
        return [before, module.register_forward_hook(lambda *_: self._leave(), always_call=True)]

    def _enter(self, name: str) -> None:
        span = record_function(name)
        span.__enter__()
        self._open.append(span)

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _annotated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name of the range, module) for modules whose class has a group; of nested attentions only the inner."""
    for module in model.modules():
        group = group_of_class(type(module).__name__)
        inner = (group_of_class(type(child).__name__) for child in module.modules() if child is not module)
        if group is not None and not (group == "attention" and "attention" in inner):
            yield f"whet::{group}", module


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's own messages; it reads this variable when it starts."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
