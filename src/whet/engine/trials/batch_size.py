"""Finds before training how many rows fit in a micro-batch, with the longest rows of the data set.

If fewer rows fit, a step has more micro-batches, and the loss curve stays the same. On a GPU a pass that does not fit
raises an error, and fewer rows are tried. On a CPU the kernel would kill the process, so the trial begins with one row
and runs only what should fit by a straight line through the measured peaks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from whet.card import Card
from whet.data import budget
from whet.data.store import RowStore
from whet.engine.description import planned_bytes
from whet.engine.run import Run
from whet.engine.trials.precision import Passes, preserving_state
from whet.errors import ConfigError
from whet.hardware import memory, trim
from whet.hardware.memory import MemoryLimit
from whet.log import logger
from whet.models.packed import without_graphs
from whet.precision import policy
from whet.precision.policy import Precision
from whet.watch.guard import STOP_FRAC, STOP_OWN_FRAC, WARN_FRAC, WARN_OWN_FRAC, MemoryGuard

CARD = Card(
    name="batch size trial",
    asked_by="auto_find_batch_size",
    does="Trial passes find how many rows fit; the rest is accumulated.",
    improves="memory",
    same_result="yes",
    hurts="When you know what fits: it takes a few passes.",
    source="find_executable_batch_size of accelerate",
    page="memory.md#batch-size",
)

_MOST_GROWTH = 4
"""The next pass has at most this many times the rows of the largest so far: a line through small passes is a guess."""
_UNKNOWN_STATE_BYTES = 8
"""Bytes of state per weight that an unknown optimizer is assumed to have: two float32 moments."""
_WIDE, _NARROW = 64, 8
"""GPU products are fastest with multiples of these numbers of rows: since the A100, and before (NVIDIA's guide)."""


@dataclass(frozen=True)
class Trial:
    """The run whose micro-batch size is to be found."""

    run: Run
    precision: Precision
    optimizer: Optimizer
    optimizer_given: bool
    """Whether the user made the optimizer: the size of its state is not known then."""
    memory: MemoryGuard | None
    check: Callable[[], None]
    """Called before each pass; may stop the run."""
    kept: int | None = None
    """The rows that were found before the run resumed; None: it has not searched before."""


def choose_micro_batch(trial: Trial) -> int:
    """Return the most rows of a micro-batch: the number asked for, or the largest that fits. The log says which.

    A run that resumes keeps the number that it has found before, unless so many do not fit any more.
    """
    run, asked = trial.run, trial.run.args.per_device_train_batch_size
    searches = run.args.auto_find_batch_size
    wanted = min(asked, trial.kept) if searches and trial.kept else asked
    rows = run.sync.micro_batch_rows(_largest(trial, wanted) if searches else asked)
    if trial.kept and rows < wanted:
        logger.warning(
            "the run resumes with %d rows at a time, as the %d of before do not fit: a packed model's losses are the "
            "same to rounding, not bitwise", rows, trial.kept,
        )  # fmt: skip
    if run.device.type == "cuda" and not run.objective.packed:
        note = slow_batch_note(rows, torch.cuda.get_device_capability(run.device))
        if note:
            logger.info("%s", note)
    return rows


def slow_batch_note(rows: int, capability: tuple[int, int]) -> str | None:
    """Return a message if a padded batch of this many rows is slow on a GPU of this capability, else None.

    Only padded batches have products whose size is a multiple of the rows. In packed batches it is the number of
    tokens, which varies. A CPU computes products in blocks of a few rows.
    """
    preferred = _WIDE if capability[1] == 0 and capability[0] >= 8 else _NARROW
    if rows % preferred == 0:
        return None
    return f"a batch of {rows} rows is not a multiple of {preferred}, with which this GPU's tensor cores are fastest"


def largest_measured(peak: Callable[[int], int], fits: Callable[[int], bool], most: int) -> int:
    """Return the most rows, up to `most`, whose measured peak fits; 0 if not even one row fits.

    Passes that should not fit, by the line through the last two peaks, are not run.
    """
    peaks: dict[int, int] = {}
    good, bad, rows = 0, most + 1, 1
    while good < rows < bad:
        peaks[rows] = peak(rows)
        good, bad = (rows, bad) if fits(peaks[rows]) else (good, rows)
        rows = _next(peaks, fits, good, bad)
    return good


def largest_tried(fits: Callable[[int], bool], most: int) -> int:
    """Return the most rows, up to `most`, with which a pass runs; 0 if it fails even with one."""
    good, bad, rows = 0, most + 1, most
    while good < rows < bad:
        good, bad = (rows, bad) if fits(rows) else (good, rows)
        rows = (good + bad) // 2
    return good


def _next(peaks: Mapping[int, int], fits: Callable[[int], bool], good: int, bad: int) -> int:
    """Return the number of rows to try next: the most that should fit, or `good` if no more do."""
    if good == 0:
        return 0
    if len(peaks) == 1:
        return min(good + 1, bad - 1)
    fewer, more = sorted(peaks)[-2:]
    slope = max((peaks[more] - peaks[fewer]) / (more - fewer), 0.0)
    candidates = range(min(_MOST_GROWTH * good, bad - 1), good, -1)
    return next((rows for rows in candidates if fits(int(peaks[good] + slope * (rows - good)))), good)


class _LongestRowPasses:
    """Forward and backward passes over the longest rows; they change nothing."""

    def __init__(self, trial: Trial, longest: np.ndarray) -> None:
        self.trial, self.longest = trial, longest
        self.n_rows = min(trial.run.args.train_rows_per_step, len(trial.run.train_dataset))

    def run(self, rows: int) -> None:
        """Run the first micro-batch of this many rows; twice if a step accumulates, as gradients are in memory then."""
        self.trial.check()
        run, device = self.trial.run, self.trial.run.device
        _, last = budget.cuts(run.train_dataset, self.longest[:rows], rows, run.args.max_tokens_per_batch)[0]
        batch = run.objective.batch(run.train_dataset, self.longest[:last], 0).to(device)
        precision = policy.make(self.trial.precision.name, device)
        Passes(self.trial.run, [batch] * (1 if last == self.n_rows else 2)).run(precision)


def _largest(trial: Trial, asked: int) -> int:
    """Return the most rows, up to those asked for, that fit; ConfigError if not even one does."""
    run = trial.run
    most = min(asked, len(run.train_dataset))
    with preserving_state(run.model), without_graphs(run.model):  # each pass has other stand-ins for the weights
        passes = _LongestRowPasses(trial, _longest(run.train_dataset, most))
        find = _on_gpu if run.device.type == "cuda" else _on_host
        found, measured = find(trial, passes, _state_bytes_to_allocate(trial), most)
    if found == 0:
        raise ConfigError(
            what="auto_find_batch_size finds no batch that fits",
            got=measured,
            why="even a pass over one row needs more memory than there is",
            fix="use --gradient_checkpointing, shorter rows, or --optim adamw_whet_8bit, which has less state",
        )
    rows = found if found < most else asked
    by_whom = "before" if trial.kept == asked else "asked for"
    logger.info("auto_find_batch_size: %s", _outcome(rows, asked, by_whom, run.args.train_rows_per_step, measured))
    return rows


def _on_host(trial: Trial, passes: _LongestRowPasses, state_bytes: int, most: int) -> tuple[int, str]:
    # A number that was found before is kept up to where the guard stops: a new measurement differs by some MiB.
    spare = (STOP_FRAC, STOP_OWN_FRAC) if trial.kept else (WARN_FRAC, WARN_OWN_FRAC)
    memory = HostMemory(trial.memory.limits if trial.memory else None, state_bytes, spare)
    peaks: dict[int, int] = {}

    def peak(rows: int) -> int:
        if not peaks:
            passes.run(rows)  # memory that is allocated once does not belong to the batch
        peaks[rows] = memory.peak(lambda: passes.run(rows))
        return peaks[rows]

    found = largest_measured(peak, memory.fits, most)
    if trial.memory is not None:
        trial.memory.forget_peak()
    measured = ", ".join(f"{rows}: {mib(size)}" for rows, size in peaks.items())
    return found, f"peaks by rows: {measured}; {mib(state_bytes)} for the optimizer; {memory.describe()}"


def _on_gpu(trial: Trial, passes: _LongestRowPasses, state_bytes: int, most: int) -> tuple[int, str]:
    memory = GpuMemory(trial.run.device, state_bytes)
    found = largest_tried(lambda rows: memory.runs(lambda: passes.run(rows)), most)
    return found, f"{memory.describe()}; {mib(state_bytes)} for the optimizer"


def _outcome(found: int, asked: int, by_whom: str, per_step: int, measured: str) -> str:
    if found == asked:
        return f"{found} rows at a time fit, as {by_whom} ({measured})"
    n_batches = -(-per_step // found)
    return f"{found} of {asked} rows at a time fit; {n_batches} batches make a step of {per_step} rows ({measured})"


def _state_bytes_to_allocate(trial: Trial) -> int:
    """Return the bytes that the optimizer has not allocated yet: all of its state, unless the run was resumed."""
    model = trial.run.model
    known = not trial.optimizer_given
    size = planned_bytes(model, trial.run.args, trial.optimizer, trial.run.place, known=known).state
    if size is None:
        n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        size = _UNKNOWN_STATE_BYTES * n_trained
    states = trial.optimizer.state.values()
    allocated = sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return max(size - allocated, 0)


def _longest(dataset: Any, n_rows: int) -> np.ndarray:
    """Return the indices of the longest rows, longest first."""
    sizes = dataset.lengths if isinstance(dataset, RowStore) else [_size(dataset[row]) for row in range(len(dataset))]
    return np.argsort(-np.asarray(sizes), kind="stable")[:n_rows]


def _size(row: Any) -> int:
    """Return the number of tokens of a row, or else of numbers in it; 1 for rows of an unknown type."""
    if not isinstance(row, Mapping):
        return 1
    if "input_ids" in row:
        return len(row["input_ids"])
    return sum(value.numel() if isinstance(value, Tensor) else int(np.size(value)) for value in row.values())


_SAMPLE_INTERVAL_S = 0.001
"""Memory is sampled this often during a pass; what is allocated for a shorter time is small."""
_SAFETY_FACTOR = 1.03
"""The peaks of a run differ from those of the trial by some MiB: rows in another order, other fragmentation."""
_GPU_MARGIN = 0.02
"""Fraction of a GPU's memory that is reserved for fragmentation."""


class HostMemory:
    """The memory of this process as the system reports it. Running out of it would not raise an error.

    `spare` are the shares of a limit, and of what the process needs, one of which stays free.
    """

    def __init__(
        self,
        limits: Callable[[], Sequence[MemoryLimit]] | None,
        state_bytes: int,
        spare: tuple[float, float] = (WARN_FRAC, WARN_OWN_FRAC),
    ) -> None:
        self._spare = spare
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
        """Return whether enough stays free at this peak plus the optimizer's state, for the memory guard."""
        needed = int(_SAFETY_FACTOR * (peak_bytes + self.state_bytes))
        more, (of_limit, of_own) = needed - _resident(), self._spare
        return all(
            limit.left_bytes - more >= min(of_limit * limit.limit_bytes, of_own * needed) for limit in self.limits()
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
