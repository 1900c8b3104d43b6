"""A callback that lets a Trainer, transformers' or whet's, take one optimizer step each time the benchmark asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from protocol import Channel
from transformers import TrainerCallback


class Gate(TrainerCallback):
    """Waits between steps.

    The clock runs from the command until the step's end, gradients zeroed: making a batch, forward, backward, clipping,
    optimizer, schedule and the Trainer's own bookkeeping are all in it. (transformers makes each batch one step ahead:
    a step then holds the making of the next one, one batch as well.)
    """

    def __init__(
        self,
        channel: Channel,
        ready: Callable[[], dict[str, Any]],
        begin: Callable[[dict[str, Any]], None],
        facts: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.channel = channel
        self.ready = ready
        """Returns what to tell of the Trainer when it begins: by then it has chosen what it chooses by itself."""
        self.begin = begin
        """Called with the command before the clock starts."""
        self.facts = facts
        """Returns what to tell of a step, from what the Trainer gives its callbacks."""
        self._started_s = 0.0
        self._profiler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.channel.answer(**self.ready())
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        seconds = time.perf_counter() - self._started_s
        self.channel.answer(seconds=seconds, **self.facts(known), **self._operators())
        self._wait(control)

    def _wait(self, control: Any) -> None:
        command = self.channel.read()
        if command["do"] == "stop":
            control.should_training_stop = True
            return
        self.begin(command)
        if command.get("profiled"):
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()
        self._started_s = time.perf_counter()

    def _operators(self) -> dict[str, Any]:
        """Return the seconds and calls of each operator of a profiled step, without those of the operators it calls."""
        if self._profiler is None:
            return {}
        self._profiler.stop()
        found = {one.key: [one.self_cpu_time_total / 1e6, one.count] for one in self._profiler.key_averages()}
        self._profiler = None
        return {"operators": found}
