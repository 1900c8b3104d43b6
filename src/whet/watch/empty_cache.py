"""Returns unused memory every few steps: the cache of a GPU, or on a CPU freed memory to the system."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from whet.card import Card
from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.hardware import memory, trim
from whet.log import logger

CARD = Card(
    name="empty cache",
    asked_by="torch_empty_cache_steps",
    does="Unused memory is returned every few steps.",
    improves="memory",
    same_result="yes",
    hurts="When memory is not what limits you: it costs time.",
    source="malloc_trim(3) of glibc; CUDA semantics of PyTorch",
    page="memory.md#unused-memory",
)

_MIB = 1 << 20


class EmptyCache:
    """Returns unused memory every `steps` optimizer steps; logs the time and the bytes at the end."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps = steps
        self._empty, self._held = _calls(device)
        self.n_calls = 0
        self.seconds = 0.0
        self.returned_bytes = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.n_calls, self.seconds, self.returned_bytes = 0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps:
            return
        before, started_s = self._held(), time.perf_counter()
        self._empty()
        self.seconds += time.perf_counter() - started_s
        self.returned_bytes += max(before - self._held(), 0)
        self.n_calls += 1

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.n_calls:
            logger.info(
                "unused memory was returned %d times: %.2f ms and %.1f MiB each, on average",
                self.n_calls, 1000 * self.seconds / self.n_calls, self.returned_bytes / self.n_calls / _MIB,
            )  # fmt: skip


def build(args: TrainingArguments, device: torch.device) -> list[EmptyCache]:
    """Return the callback that the arguments ask for, or none; raises ConfigError if it would have no effect."""
    return [] if args.torch_empty_cache_steps is None else [EmptyCache(args.torch_empty_cache_steps, device)]


def _calls(device: torch.device) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return two functions: one returns unused memory, the other reports the bytes held."""
    if device.type == "cuda":
        return torch.cuda.empty_cache, lambda: torch.cuda.memory_reserved(device)
    reason = trim.why_not() if device.type == "cpu" else f"whet knows no such call for {device.type}"
    if reason is not None:
        raise ConfigError(
            what="torch_empty_cache_steps can do nothing here",
            got=f"a model on {device}",
            why=reason,
            fix="leave --torch_empty_cache_steps out",
        )
    return trim.trim(), lambda: memory.resident_bytes() or 0
