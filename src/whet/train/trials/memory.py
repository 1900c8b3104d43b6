"""Measures how much memory a pass takes, and whether it fits in addition to the optimizer's state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from whet.errors import ConfigError
from whet.hardware import memory, trim
from whet.hardware.memory import MemoryLimit
from whet.train.control.guard import WARN_FRAC, WARN_OWN_FRAC

_SAMPLE_INTERVAL_S = 0.001
"""Memory is sampled this often during a pass; what is allocated for a shorter time is small."""
_SAFETY_FACTOR = 1.03
"""The peaks of a run differ from those of the trial by some MiB: rows in another order, other fragmentation."""
_GPU_MARGIN = 0.02
"""Fraction of a GPU's memory that is reserved for fragmentation."""


class HostMemory:
    """The memory of this process as the system reports it. Running out of it would not raise an error."""

    def __init__(self, limits: Callable[[], Sequence[MemoryLimit]] | None, state_bytes: int) -> None:
        self.limits = limits or memory.memory_limits
        self.state_bytes = state_bytes
        self._trim = (lambda: None) if trim.why_not() else trim.trim()
        if memory.resident_bytes() is None or not self.limits():
            raise ConfigError(
                what="auto_find_batch_size cannot measure memory here",
                why="on a CPU it reads this process's memory and its limits, which this system does not report",
                fix="leave it out, and set --per_device_train_batch_size by hand",
            )

    def peak(self, run: Callable[[], None]) -> int:
        """Return the peak memory of this process during the call."""
        self._trim()  # memory left over from an earlier pass would be reused, and the peak too low
        done, seen = threading.Event(), [_resident()]

        def watch() -> None:
            while not done.wait(_SAMPLE_INTERVAL_S):
                seen.append(_resident())

        watcher = threading.Thread(target=watch, name="whet-memory", daemon=True)
        watcher.start()
        try:
            run()
        finally:
            done.set()
            watcher.join()
        most = max(*seen, _resident())
        self._trim()
        return most

    def fits(self, peak_bytes: int) -> bool:
        """Return whether the memory guard would not warn at this peak plus the optimizer's state."""
        needed = int(_SAFETY_FACTOR * (peak_bytes + self.state_bytes))
        more = needed - _resident()
        return all(
            limit.left_bytes - more >= min(WARN_FRAC * limit.limit_bytes, WARN_OWN_FRAC * needed)
            for limit in self.limits()
        )

    def describe(self) -> str:
        """Return the tightest limit, in words."""
        limit = min(self.limits(), key=lambda limit: limit.left_bytes)
        return f"{mib(limit.left_bytes)} are left of {mib(limit.limit_bytes)} that {limit.of} allows"


class GpuMemory:
    """The memory of a GPU: a pass that does not fit raises an error."""

    def __init__(self, device: torch.device, state_bytes: int) -> None:
        self.device, self.state_bytes = device, state_bytes
        self.most = 0
        """Peak memory of the passes that ran."""

    def runs(self, run: Callable[[], None]) -> bool:
        """Return whether this call fits in addition to the optimizer's state; its memory is freed again."""
        margin = int(_GPU_MARGIN * torch.cuda.get_device_properties(self.device).total_memory)
        torch.cuda.reset_peak_memory_stats(self.device)
        held = None
        try:
            held = torch.empty(self.state_bytes + margin, dtype=torch.uint8, device=self.device)
            run()
            ran = True
        except torch.OutOfMemoryError:
            ran = False
        del held  # the error is gone here too, and with it the tensors that its traceback held
        torch.cuda.empty_cache()
        if ran:
            self.most = max(self.most, torch.cuda.max_memory_allocated(self.device) - margin)
        return ran

    def describe(self) -> str:
        """Return what was measured, in words."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return f"{mib(self.most)} of {mib(total)} at the peak"


def mib(n_bytes: float) -> str:
    """Return an amount of memory for people."""
    return f"{n_bytes / 2**20:,.0f} MiB"


def _resident() -> int:
    return memory.resident_bytes() or 0
