"""What a training that has begun will take: a forked process rehearses its step while the training continues.

A rehearsal in the training itself would leave traces: a table that a model keeps would be kept without its numbers. In
a child, memory is copied where it is written, so nothing that the child does reaches the training. Forking after
threads have run is safe as the child has one thread, which enters no parallel region, as a worker of a DataLoader does.

The child is disposable. The system ends it with this process, the run ends it with the training, and a child without an
answer is killed after a while: then there is no forecast. It costs the training the fork, and the moment in which the
child gives back what it does not need: pages that both hold are copied once the training writes to them. So the steps
next to the child are slow, and the pace of the run is that of the first steps after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from whet import console, system
from whet.data.store import RowStore
from whet.hardware import memory, trim
from whet.log import logger
from whet.models.fused.layers import GRADIENT
from whet.objectives.base import teacher_of
from whet.watch import guard, printing, stop

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments
    from whet.engine.engine import Engine
    from whet.engine.forecast import Forecast
    from whet.engine.run import Run
    from whet.plan.rates import Rates
    from whet.watch.meter import Clock

LEAST_S = 60.0
"""A training that is done sooner has no forecast."""
_AFTER_STEPS = 2
"""The first step is slow: the second one shows how long the run takes."""
_MOMENT_S = 0.5
"""The training waits for its child at most so long, for it to give back memory."""
_PACE_STEPS, _PACE_S = 10, 4.0
"""Once the child is gone, the pace is known after so many steps more, or after the first that ends later than this."""
_PATIENCE_S = 180.0
_MOST_BYTES = 1 << 29
"""What the child may allocate."""
_LATER_BYTES = 40 << 20
"""What a training of a command holds more at its end than at its second step: modules that judge, save and report."""
_LOWEST_PRIORITY = 19
_ERROR_FRAC, _STEP_FRAC = 0.15, 0.5
"""How far off the time by the pace of the first steps may be: that of the run, as other programs come and go, and that
of one step, which is less for the mean of several."""
_BEFORE = ("start", "trial")
"""Parts of the time before the first step."""
_PAUSES = ("evaluation", "saving")
"""Parts of the time between steps."""
_MADV_DONTNEED = 4


class ForkedForecast:
    """The callback of an engine that forecasts its training; `found` gets the forecast once there is one.

    A forecast has `peak_bytes` and `free_bytes`, None if the model cannot be rehearsed, else also its `parts`;
    `train_s`, `low` and `high` in seconds, of this process's training from its begin; and `time_by`: rates of the
    machine and the pace so far, with the parts of the `time`, or pace alone.
    """

    def __init__(self, engine: Engine, found: Callable[[Mapping[str, Any]], None], tested: Any = None) -> None:
        """`tested` are the rows that the model predicts once it is trained, whose memory the forecast counts."""
        self._engine, self._found, self._tested = engine, found, tested
        self._child: _Child | None = None
        self._answer: Mapping[str, Any] | None = None
        """What the child has found, while the pace is not known."""
        self._began_s = self._answered_s = 0.0
        self._n_steps = self._first = 0
        self._n_paced = 0
        """Steps since the answer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began_s, self._first = time.perf_counter(), state.global_step
        self._n_steps = self._n_paced = 0
        self._answer = None

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Any, **known: Any) -> None:
        self._n_steps += 1
        if self._n_steps == _AFTER_STEPS and meter.clock.left_s >= LEAST_S:
            self._begin(state, known["optimizer"])
        elif self._child is not None and (answer := self._child.answer()) is not None:
            self._child, self._answer, self._answered_s = None, answer, time.perf_counter()
            meter.clock.forget_pace()
        elif self._answer is not None:
            self._n_paced += 1
            if self._n_paced > _PACE_STEPS or time.perf_counter() - self._answered_s > _PACE_S:
                found, self._answer = self._complete(self._answer, meter.clock), None
                self._found(found)
                _show(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _begin(self, state: Any, optimizer: Any) -> None:
        engine, first, tested = self._engine, self._first, self._tested
        why = _why_not(engine, state.train_batch_size)
        if why is None:
            parent = _Held.now(engine.args.memory_limit_gb)
            teacher = teacher_of(engine.objective)
            models = (engine.model, *([] if teacher is None else [teacher]))
            weights = (one for model in models for one in model.parameters())
            values = [*weights, *_tensors_in(optimizer.state), *_kept_gradients(engine.model)]
            try:
                self._child = _Child(lambda: _forecast(engine, optimizer, parent, first, tested), values)
            except OSError as error:  # no process, or no memory for its tables
                why = str(error)
        if why is not None:
            logger.debug("no forecast of this training: %s", why)

    def _complete(self, answer: Mapping[str, Any], clock: Clock) -> Mapping[str, Any]:
        """Return the answer of the child with the time: by the rates of this machine and the pace so far, or by that.

        What other programs do to this training, the pace knows alone; where its time goes, the rates. Each counts by
        how little it may be off.
        """
        taken_s = time.perf_counter() - self._began_s
        pace_error = math.hypot(_ERROR_FRAC, _STEP_FRAC / math.sqrt(self._n_paced))
        found: dict[str, Any] = {"peak_bytes": None, "free_bytes": None, **answer}
        if "time" not in found:
            low_s, high_s = clock.left_s / (1 + pace_error), clock.left_s * (1 + pace_error)
            times = {"train_s": taken_s + clock.left_s, "low": taken_s + low_s, "high": taken_s + high_s}
            return found | times | {"time_by": "pace"}
        error = found.pop("error_frac")
        by_rates_s = sum(each_s for part, each_s in found["time"].items() if part not in _PAUSES)
        slower = (clock.training_s + clock.steps_left_s) / max(by_rates_s, 1e-9)
        sampled = _STEP_FRAC / math.sqrt(self._n_paced)
        slower **= error**2 / (error**2 + sampled**2)
        parts = {part: each_s * (1.0 if part == "saving" else slower) for part, each_s in found["time"].items()}
        train_s, error = sum(parts.values()), max(_ERROR_FRAC, error * sampled / math.hypot(error, sampled))
        times = {"train_s": train_s, "low": train_s / (1 + error), "high": train_s * (1 + error), "time": parts}
        return found | times | {"time_by": "rates"}


def _show(found: Mapping[str, Any]) -> None:
    """Print the forecast, and log a warning if the training will not fit."""
    peak, free = found["peak_bytes"], found["free_bytes"]
    parts = [] if peak is None else [f"{console.amount(peak)} at the peak"]
    printing.show([f"forecast: {', '.join([*parts, console.between(found['train_s'], found['low'], found['high'])])}"])
    if peak is not None and free is not None and peak > free:
        logger.warning(
            "this training is forecast to need %s, and %s are free: the system may end it. A smaller"
            " --per_device_train_batch_size with more --gradient_accumulation_steps needs less; whet plan with these"
            " options and --fit lists what fits",
            console.amount(peak), console.amount(free),
        )  # fmt: skip


def _why_not(engine: Engine, micro_rows: int) -> str | None:
    """Return why this training is not forecast; None if it is."""
    from whet.methods import compile_blocks

    args = engine.args
    reasons = {
        "several ranks train together": engine.sync.n_ranks > 1,
        "it runs on a GPU": engine.device.type != "cpu",
        "the rows do not say how long they are": not isinstance(engine.spec.train_dataset, RowStore),
        "its blocks are compiled": compile_blocks.is_on(engine.model),
        "its state is somewhere else": args.offload != "none" or args.deepspeed is not None,
        "the optimizer is not whet's": engine.spec.optimizers[0] is not None,
        "a profiler runs": args.profile,
        "the micro-batch is not the one that was asked for": micro_rows != args.per_device_train_batch_size,
        "too little memory is left for it": not _has_room(args),
    }
    return system.why_no_fork() or next((why for why, holds in reasons.items() if holds), None) or trim.why_not()


def _has_room(args: TrainingArguments) -> bool:
    """Return whether the guard of the training would not stop it for what the child allocates.

    The limit of `memory_limit_gb` is on the training alone.
    """
    watching = None if args.memory_limit_gb is not None else guard.memory_guard(None)
    return watching is None or watching.has_room_for(_MOST_BYTES)


@dataclass(frozen=True)
class _Held:
    """The memory of the training when it forks."""

    resident_bytes: int
    anonymous_bytes: int
    """Of these, what is in no file."""
    free_bytes: int | None
    """What the training may hold in all."""

    @classmethod
    def now(cls, limit_gb: float | None) -> _Held:
        held = memory.resident_bytes() or 0
        unheld = 0 if memory.address_space_bytes() is None else memory.unheld_bytes()
        free = memory.free_bytes(held_bytes=held, unheld_bytes=unheld, limit_gb=limit_gb)
        return cls(held, memory.anonymous_bytes() or 0, free)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors_in(getattr(value, one.name))


def _kept_gradients(model: torch.nn.Module) -> Iterator[Tensor]:
    for one in model.modules():
        if hasattr(one, GRADIENT):
            yield getattr(one, GRADIENT).buffer
    yield from (weight.grad for weight in model.parameters() if weight.grad is not None)


# ---- in the child ----


def _forecast(engine: Engine, optimizer: Any, parent: _Held, first: int, tested: Any) -> dict[str, Any]:
    """Return what the training takes whose process has forked; only memory can lack."""
    from whet.engine.forecast import of_run
    from whet.plan import rates as known_rates
    from whet.plan.rehearsal import Rehearsal

    rates = known_rates.cached(known_rates.key_here())
    torch.set_num_threads(1)
    memory.lift_address_limit()
    rehearsal = Rehearsal()
    _limit_memory()
    run = engine.planned()
    optimizer.state.clear()  # its first update is rehearsed, which makes the state
    own_bytes = memory.anonymous_bytes() or 0
    held_bytes = parent.resident_bytes - parent.anonymous_bytes + own_bytes + _LATER_BYTES
    found = of_run(run, engine.precision.name, optimizer, held_bytes, rehearsal, parent.free_bytes, tested)
    forecast = found.memory
    answer = {"peak_bytes": forecast.peak_bytes, "free_bytes": forecast.free_bytes, "parts": dict(forecast.parts)}
    return answer if rates is None else answer | _times(rates, found, run, first)


def _times(rates: Rates, found: Forecast, run: Run, first: int) -> dict[str, Any]:
    """Return the parts of the training's time from its step `first`, by what this machine does in a second.

    `error_frac` is the share that these are off by, most of the time.
    """
    from whet.engine.forecast import left_of
    from whet.plan import seconds

    took = seconds.forecast(rates, found.anatomy, left_of(run, found.workload, first))
    parts = {part: each_s for part, each_s in took.run.items() if part not in _BEFORE}
    return {"time": parts, "error_frac": took.error_frac}


def _limit_memory() -> None:
    """Let this process allocate so much more than it holds, with the addresses of a rehearsal, which are no memory."""
    if (size := memory.data_bytes()) is not None:
        system.set_soft_limit("DATA", size + _MOST_BYTES)


class _Child:
    """A process that computes one answer; OSError if there can be none."""

    def __init__(self, compute: Callable[[], Mapping[str, Any]], values: Iterable[Tensor]) -> None:
        """`values` are tensors whose numbers the computation does not read."""
        values = list(values)
        self._until_s = time.perf_counter() + _PATIENCE_S
        self._text = b""
        ends_with_this = system.ending_with(os.getpid())
        os.close(os.pidfd_open(os.getpid()))  # which Linux has since 5.3
        self._reads, writes = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)  # no handler of the training runs in the child
        try:
            self._pid = _fork()
            if not self._pid:
                _answer(compute, values, writes, ends_with_this)
            self._handle = os.pidfd_open(self._pid)  # which means this process, even if others get its number
        except OSError:
            os.close(self._reads)
            raise
        finally:
            os.close(writes)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.set_blocking(self._reads, False)
        select.select([self._reads], [], [], _MOMENT_S)

    def answer(self) -> Mapping[str, Any] | None:
        """Return the answer if there is one by now, and end the child; {} if there will be none."""
        text = b""
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._reads, 1 << 16):
                self._text += text
            self.end()
            return self._read()
        if time.perf_counter() > self._until_s:
            self.end()
            return {}
        return None

    def end(self) -> None:
        """End the child, if it runs still, and leave nothing of it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # a process that ignores SIGCHLD has no zombies
            os.waitpid(self._pid, 0)
        os.close(self._reads)
        os.close(self._handle)

    def _read(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self._text)
        except ValueError:
            logger.debug("no forecast of this training: its process ended without one")
            return {}
        if "error" in found:
            logger.debug("no forecast of this training's memory: %s", found["error"])
            return {}
        return found


def _fork() -> int:
    """Fork; libraries that warn of a fork have no reason here."""
    variable = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(variable)
    os.environ[variable] = before or "false"  # or tokenizers print a warning in the child
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, in a process with threads
            return os.fork()
    finally:
        if before is None:
            del os.environ[variable]


def _answer(
    compute: Callable[[], Mapping[str, Any]], values: list[Tensor], writes: int, ends_with_parent: Callable[[], bool]
) -> NoReturn:
    """Write the answer as JSON, and end this process."""
    try:
        _leave_the_training(writes, ends_with_parent)
        _give_back(values)
        os.write(_PIPE, b"\n")
        os.nice(_LOWEST_PRIORITY)
        try:
            found = dict(compute())
        except Exception as error:  # a model of a user's own may do anything with its numbers, which are not there
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        os.write(_PIPE, json.dumps(found).encode())
    finally:
        os._exit(0)


def _leave_the_training(writes: int, ends_with_parent: Callable[[], bool]) -> None:
    """Keep nothing in common with the training but its memory and the pipe."""
    if not ends_with_parent():
        os._exit(0)
    stop.ignore()
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in range(_PIPE):
        os.dup2(nothing, handle)
    os.dup2(writes, _PIPE, inheritable=False)
    os.closerange(_PIPE + 1, os.sysconf("SC_OPEN_MAX"))
    gc.disable()
    system.go_first()
    system.dump_no_core()


_PIPE = 3
"""The handle of the pipe in the child; those below are /dev/null."""


def _give_back(values: list[Tensor]) -> None:
    """Return the pages of these tensors, and those that the allocator keeps, to the system."""
    give = ctypes.CDLL(None).madvise
    give.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    for one in values:
        storage = one.untyped_storage()
        begin, end = -(-storage.data_ptr() // page) * page, (storage.data_ptr() + storage.nbytes()) // page * page
        if end > begin:
            give(begin, end - begin, _MADV_DONTNEED)
    trim.trim()()
