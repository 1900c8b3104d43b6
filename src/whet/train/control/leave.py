"""Leaving a run between two micro-batches, so that it can go on as if it had not stopped.

A checkpoint holds whole optimizer steps. Where a run leaves inside a step, the step's gradients are dropped, and all
its micro-batches are done again after resuming, with the same rows and masks: bit for bit the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import lasting
from whet.config.arguments import TrainingArguments
from whet.errors import EXIT_OTHER, EXIT_STOPPED_AND_SAVED, WhetError
from whet.log import logger
from whet.train.checkpoint import folder as checkpoint
from whet.train.control import guard, lock, stop
from whet.train.control.stop import Stopped
from whet.train.output import run_log
from whet.train.resume import kinds
from whet.train.state import State

if TYPE_CHECKING:
    from whet.train.loop import Fit


class Edges:
    """The places of a run where it may leave: each micro-batch ends at one."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.memory = guard.memory_guard(fit.args)
        self.pending: dict[str, bool] | None = None
        """What was due at the step of a checkpoint when the run left; it is done after resuming."""

    def state(self) -> State:
        """Return what was due when the run left."""
        return {"pending": self.pending}

    def load_state(self, saved: State) -> None:
        """Note what is still due."""
        kinds.require_all(saved, {"pending": kinds.or_none(kinds.an_object)}, "edges")
        self.pending = saved["pending"]

    def cross(self) -> None:
        """Go on, or save and leave: because of a signal, or because memory runs out."""
        if name := stop.asked():
            self.leave(f"stopped by {name}", {})
        if self.memory is not None and (scarce := self.memory.look()):
            self._leave_for_memory(scarce)

    def evaluate(self, **due: bool) -> dict[str, float]:
        """Evaluate; a signal in between leaves with a checkpoint that remembers what was `due` at this step."""
        try:
            return self.fit.evaluate()
        except Stopped:
            self.pending = due
            self.leave(f"stopped by {stop.asked()} during the evaluation", {})
            raise

    def leave(self, why: str, again: dict[str, object], *, code: int = EXIT_STOPPED_AND_SAVED) -> None:
        """Save what is done, where it is not saved yet, and raise Stopped."""
        fit = self.fit
        fit.optimizer.zero_grad(set_to_none=True)
        done = fit.state.global_step
        if done == 0:
            what = f"{why} before the first step was done: nothing was lost, start again with the same command"
            raise Stopped(what, again, code)
        if fit.trainer.events.control.should_training_stop:
            self.pending = (self.pending or {}) | {"stop": True}
        folder = Path(fit.args.output_dir) / checkpoint.folder_name(done)
        fit.saver.wait()
        if self.pending or folder not in fit.saver.folders:
            fit.saver.save(done, better=False)
            fit.saver.wait()
        kept = f"saved in {folder}, no completed step is lost"
        what = (
            f"{why} after step {done}: {kept if folder in fit.saver.folders else 'its checkpoint could not be written'}"
        )
        raise Stopped(what, fit.saver.next_start() | again, code)

    def take_up(self) -> None:
        """Do what a checkpoint says was due when the run left."""
        due, self.pending = self.pending, None
        if not due:
            return
        control = self.fit.trainer.events.control
        control.should_training_stop = due.get("stop", False)
        if "epoch_ends" in due:
            control.should_evaluate, control.should_save = due["evaluate"], due["save"]
            self.fit._judge_and_save(epoch_ends=due["epoch_ends"])

    def _leave_for_memory(self, scarce: str) -> None:
        """Leave before the kernel ends the process; a run that came no step further in it fails, as it would again."""
        again = smaller_batches(self.fit.micro_rows, self.fit.args.train_rows_per_step)
        if again and self.fit.trainer.objective.padding.in_loss != "none":
            # The loss counts padding by batches of per_device_train_batch_size rows, so that number has to stay.
            again = dict[str, object](auto_find_batch_size=True)
        if self.fit.state.global_step == 0:
            raise _no_first_step(scarce, again)
        code = EXIT_STOPPED_AND_SAVED if self.fit.meter.n_steps else EXIT_OTHER
        self.leave(f"stopped, as memory runs out ({scarce}; smaller batches take less)", again, code=code)


def _no_first_step(scarce: str, again: Mapping[str, object]) -> WhetError:
    """Return the error of a run for which there is too little memory from the start: nothing goes on from it."""
    smaller = " ".join(f"--{name} {value}" for name, value in again.items())
    return WhetError(
        what="memory runs out before the first step is done",
        got=scarce,
        why="the run would end in the same way each time it starts",
        fix=(f"use {smaller} for the same curve in less memory, or " if smaller else "")
        + "allow more: a higher --memory_limit_gb, or 0 for no watch",
    )


def smaller_batches(micro_rows: int, rows_per_step: int) -> dict[str, object]:
    """Return settings for at most half as many rows at a time, none for a single row.

    As many rows as before make a step: the loss curve stays. `micro_rows` are those of now, which
    auto_find_batch_size may have found.
    """
    rows = next((rows for rows in range(micro_rows // 2, 0, -1) if rows_per_step % rows == 0), None)
    if rows is None:
        return {}
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": rows_per_step // rows}


@contextlib.contextmanager
def watched(args: TrainingArguments) -> Iterator[None]:
    """Train within the block: hear signals if asked to, and be alone in the output folder if anything is saved."""
    writes = args.save_strategy != "no" or args.enable_jit_checkpoint
    folder = Path(args.output_dir)
    alone = lock.locked_if_possible(folder) if writes else contextlib.nullcontext()
    with lasting.outputs(), stop.listening(args.enable_jit_checkpoint), alone, _logged(folder, writes=bool(writes)):
        try:
            yield
        except Stopped as stopped:
            if args.enable_jit_checkpoint:
                logger.warning("%s%s", stopped, _settings(stopped.again))
            raise


def _logged(folder: Path, *, writes: bool) -> contextlib.AbstractContextManager[None]:
    """Keep the run's messages in the folder if the run writes there at all."""
    return run_log.kept(folder) if writes and folder.is_dir() else contextlib.nullcontext()


def _settings(again: dict[str, Any]) -> str:
    return "; resume with " + ", ".join(f"{name}={value!r}" for name, value in again.items()) if again else ""
