"""Safe points: where a run may stop and later resume as if it had not stopped. Each micro-batch ends at one.

A checkpoint holds complete optimizer steps. If a run stops inside a step, the gradients of that step are dropped; after
resuming, all its micro-batches run again with the same rows and masks, and the step is bitwise the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from whet import lasting
from whet.config.arguments import TrainingArguments
from whet.engine.sync import Sync
from whet.errors import EXIT_OTHER, EXIT_STOPPED_AND_SAVED, ConfigError, WhetError
from whet.hardware.memory import CGROUP
from whet.log import logger
from whet.store import find, schema
from whet.store.save import Saver
from whet.store.snapshot import RunState
from whet.store.state import State
from whet.watch import lock, run_log, stop
from whet.watch.events import Events
from whet.watch.guard import MemoryGuard
from whet.watch.stop import Stopped


class SafePoints:
    """Stops a run between two micro-batches: because of a signal, or because memory runs out."""

    def __init__(self, state: RunState, saver: Saver, events: Events, sync: Sync, memory: MemoryGuard | None) -> None:
        self._state, self._saver, self._events, self._sync = state, saver, events, sync
        self.memory = memory
        self.micro_rows = state.run.args.per_device_train_batch_size
        """Most rows of a micro-batch now. A run that is out of memory is advised to use fewer."""
        self.pending: dict[str, bool] | None = None
        """What was due at the step of a checkpoint when the run stopped. A resumed run does it first."""

    def state(self) -> State:
        """Return what was due when the run stopped."""
        return {"pending": self.pending}

    def load_state(self, saved: State) -> None:
        """Take over what is still due."""
        schema.require_all(saved, {"pending": schema.optional(schema.json_object)}, "edges")
        self.pending = saved["pending"]

    def take_pending(self) -> dict[str, bool]:
        """Return what is still due, and clear it."""
        due, self.pending = self.pending or {}, None
        return due

    def check(self) -> None:
        """Save and stop if a signal asked for it, or if memory runs out."""
        self.check_signal()
        shortage = None if self.memory is None else self.memory.shortage()
        if shortage := self._sync.memory_shortage(shortage):
            self._stop_for_memory(shortage)

    def check_signal(self) -> None:
        """Save and stop if a signal asked for it."""
        if name := self._sync.stop_signal(stop.requested()):
            self.save_and_stop(f"stopped by {name}")

    def stop_in_evaluation(self, due: dict[str, bool]) -> NoReturn:
        """Save and stop during an evaluation; what was `due` at this step is done after resuming."""
        self.pending = due
        name = self._sync.stop_signal(stop.requested())
        self.save_and_stop(f"stopped by {name} during the evaluation")

    def save_and_stop(
        self, why: str, again: Mapping[str, object] = MappingProxyType({}), *, code: int = EXIT_STOPPED_AND_SAVED
    ) -> NoReturn:
        """Save the completed steps, unless they are saved, and raise Stopped; `again` are settings to resume with."""
        self._state.optimizer.zero_grad(set_to_none=True)
        done = self._state.counters.global_step
        if done == 0:
            what = f"{why} before the first step was done: nothing was lost, start again with the same command"
            raise Stopped(what, again, code)
        if self._events.control.should_training_stop:
            self.pending = (self.pending or {}) | {"stop": True}
        folder = self._state.run.output_dir / find.folder_name(done)
        self._saver.wait()
        if self._sync.save_now(bool(self.pending) or not self._saver.has(folder)):
            self._saver.save(done, better=False, stops=True)
            self._saver.wait()
        saved = self._saver.has(folder)
        outcome = f"saved in {folder}, no completed step is lost" if saved else "its checkpoint could not be written"
        raise Stopped(f"{why} after step {done}: {outcome}", {**self._saver.settings_to_resume(), **again}, code)

    def _stop_for_memory(self, shortage: str) -> NoReturn:
        """Stop before the kernel kills the process. A process that completed no step fails: it would fail again."""
        args, meter = self._state.run.args, self._state.meter
        again = smaller_batches(args, self.micro_rows, args.train_rows_per_step // self._sync.n_ranks)
        if self._state.counters.global_step == 0:
            raise _no_first_step(shortage, again, args)
        code = EXIT_STOPPED_AND_SAVED if meter.n_steps else EXIT_OTHER
        less = "smaller batches need less" if again else f"{flags} needs less" if (flags := _others(args)) else ""
        known = f"{shortage}; {less}" if less else shortage
        self.save_and_stop(f"stopped, as memory runs out ({known})", again, code=code)


def _no_first_step(shortage: str, again: Mapping[str, object], args: TrainingArguments) -> WhetError:
    """Return the error of a run that has too little memory for its first step."""
    smaller = " ".join(f"--{name} {value}" for name, value in again.items())
    less = f"{smaller} for the same curve in less memory" if smaller else _others(args, begins=True)
    return no_first_step(shortage, less, None if args.memory_limit_gb is None else "--memory_limit_gb")


def no_first_step(shortage: str, less: str, limit: str | None) -> WhetError:
    """Return the error of a training that has too little memory for its first step.

    `less` are settings that need less, "" if there are none; `limit` is the name of the limit that its user has set.
    """
    if limit is not None:
        more = f"allow more: a higher {limit}, or none, so that the machine's and the cgroup's limits count"
    elif CGROUP in shortage:
        more = "raise the memory limit of the container or job, which the kernel enforces: docker run -m, "
        more += "resources.limits.memory of the pod, MemoryMax of systemd, the memory that the Slurm job asks for"
    else:
        more = "end other programs, or use a machine with more memory"
    return WhetError(
        what="memory runs out before the first step is done",
        got=shortage,
        why="the run would end in the same way each time it starts",
        fix=(f"use {less}, or " if less else "") + more,
    )


def _others(args: TrainingArguments, *, begins: bool = False) -> str:
    """Return the flags that need less memory with batches as they are; only a run that begins may change its optimizer.

    "" if it has them all.
    """
    found = [] if args.gradient_checkpointing else ["--gradient_checkpointing"]
    found += [f"--optim {_FEW_BYTES[0]}"] if begins and args.optim not in _FEW_BYTES else []
    return " or ".join(found)


_FEW_BYTES = ("adamw_whet_8bit", "adafactor")
"""Optimizers with little state; the first is the one that computes what the usual one does."""


def smaller_batches(args: TrainingArguments, micro_rows: int, rows_per_step: int) -> dict[str, object]:
    """Return settings for at most half as many rows in a micro-batch; no settings if it has only one.

    A step keeps its rows, so the loss curve stays the same. `micro_rows` is the present number, which
    auto_find_batch_size may have chosen. Where another split would change the result, auto_find_batch_size takes as
    many rows as fit, if these settings go with it.
    """
    from whet.plan.choose import fixed_split

    if fixed_split(args):
        return {"auto_find_batch_size": True} if micro_rows > 1 and _may_search(args) else {}
    rows = next((rows for rows in range(micro_rows // 2, 0, -1) if rows_per_step % rows == 0), None)
    if rows is None:
        return {}
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": rows_per_step // rows}


def _may_search(args: TrainingArguments) -> bool:
    if args.auto_find_batch_size:
        return False
    try:
        replace(args, auto_find_batch_size=True)
    except ConfigError:
        return False
    return True


@contextlib.contextmanager
def guarded(args: TrainingArguments) -> Iterator[None]:
    """Train within the block: handle signals if asked to, and lock the output folder if anything is saved."""
    writes = args.save_strategy != "no" or args.enable_jit_checkpoint
    folder = Path(args.output_dir)
    alone = lock.locked_if_possible(folder) if writes else contextlib.nullcontext()
    signals = stop.handling_signals(args.enable_jit_checkpoint)
    with lasting.outputs(), signals, alone, _logged(folder, writes=bool(writes)):
        try:
            yield
        except Stopped as stopped:
            if args.enable_jit_checkpoint:
                logger.warning("%s%s", stopped, _settings(stopped.again))
            raise


def _logged(folder: Path, *, writes: bool) -> contextlib.AbstractContextManager[None]:
    """Keep the messages of the run in the folder if the run writes there at all."""
    return run_log.written_to(folder) if writes and folder.is_dir() else contextlib.nullcontext()


def _settings(again: dict[str, Any]) -> str:
    return "; resume with " + ", ".join(f"{name}={value!r}" for name, value in again.items()) if again else ""
