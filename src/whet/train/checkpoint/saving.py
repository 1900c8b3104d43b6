"""When a run saves, and how: synchronously or in the background, with rotation, and what follows from an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import StorageError
from whet.log import logger
from whet.train.checkpoint import folder as checkpoint
from whet.train.checkpoint import lineage as lines
from whet.train.checkpoint import snapshot
from whet.train.checkpoint.lineage import Line
from whet.train.checkpoint.snapshot import RunState
from whet.train.control import guard
from whet.train.output import disk_errors
from whet.train.resume import compare, kinds
from whet.train.state import State


@dataclass
class Write:
    """One checkpoint on its way to the disk; `run` reads nothing that the training loop changes."""

    staged: checkpoint.Staged
    content: snapshot.Snapshot
    facts: dict[str, Any]
    earlier: Sequence[Path]
    keep: int | None
    protected: Path | None
    error: BaseException | None = None

    def run(self) -> None:
        """Write and publish the checkpoint, then remove the ones that are too many; an error is kept for later."""
        try:
            self.staged.put(self.content.write_tensors)
            self.staged.publish(self.facts)
            checkpoint.rotate([*self.earlier, self.staged.target], self.keep, self.protected)
        except BaseException as error:
            self.error = error


@dataclass
class Saver:
    """Writes the checkpoints of one run; `folders` are those that exist, oldest first."""

    run_state: RunState
    on_saved: Callable[[], None]
    """Called after each checkpoint that was written."""
    n_ranks: int = 1
    folders: list[Path] = field(default_factory=list)
    line: Line = field(default_factory=lines.begin)
    """The line of training that its checkpoints belong to."""
    resumed_from: Path | None = None
    _last_s: float = field(default_factory=lambda: time.monotonic())
    _buffers: snapshot.Buffers | None = None
    _flight: tuple[threading.Thread, Write] | None = None

    def __post_init__(self) -> None:
        self._run, self._counters = self.run_state.run, self.run_state.counters
        if self._run.args.save_async:
            self._buffers = snapshot.Buffers()

    def resume(self, folder: Path) -> None:
        """Note where the run resumes from: at the end of its line, or on a new one."""
        self.resumed_from = folder
        self.line = checkpoint.resumed_line(folder, self._run.output_dir)

    @property
    def last(self) -> Path | None:
        """The checkpoint that this run would resume from; None if it saved nothing yet."""
        return self.folders[-1] if self.folders else self.resumed_from

    def next_start(self) -> dict[str, object]:
        """Return the setting that resumes from the last checkpoint of this run; none where nothing is saved."""
        last = self.last
        newest = checkpoint.would_resume(self._run.output_dir)
        if newest is None and last is None:
            return {"resume_from_checkpoint": "auto"}
        if newest is not None and last is not None and newest.absolute() == last.absolute():
            return {"resume_from_checkpoint": "auto"}
        return {"resume_from_checkpoint": str(last)} if last is not None else {}

    def state(self) -> State:
        """Return the names of the run's checkpoints."""
        return {"names": [path.name for path in self.folders]}

    def load_state(self, saved: State) -> None:
        """Take over the checkpoints of an earlier part of the run; a kill may have left one too many."""
        kinds.require_all(saved, {"names": kinds.list_of(kinds.text)}, "checkpoints")
        folders = self._own(saved["names"])
        checkpoint.rotate(folders, self._run.args.save_total_limit, self._protected())
        self.folders = [path for path in folders if path.is_dir() and not path.is_symlink()]

    def _own(self, names: Sequence[str]) -> list[Path]:
        """Return the run's checkpoints that are still there; none if it resumes in another folder."""
        output_dir, folder = self._run.output_dir, self.resumed_from
        if folder is None or folder.resolve().parent != output_dir.resolve():
            return []
        wanted = {folder.name, *names}
        there = lines.places([path for path in checkpoint.every(output_dir) if path.name in wanted])
        return [one.folder for one in there if self.line.holds(one.line.run, one.step)]

    def due(self, done: int, *, epoch_ends: bool, complete: bool, better: bool) -> bool:
        """Return whether a checkpoint is to be written after `done` steps; the last step of a rhythm always is."""
        rhythm = self._run.plan.save
        if rhythm.strategy == "best":
            return better
        if rhythm.strategy == "time":
            return complete or time.monotonic() - self._last_s >= self._run.args.save_interval_s
        return rhythm.due(done, epoch_ends) or (complete and rhythm.strategy == "steps")

    def save(self, done: int, *, better: bool) -> None:
        """Write the checkpoint of this step, or begin to; raises StorageError as `save_error_policy` says."""
        self.wait()  # at most one is on its way
        guard.require_finite(self._run.model, self.run_state.optimizer, f"after step {done}")
        self._last_s = time.monotonic()
        output_dir, state = self._run.output_dir, self._counters
        before = state.best_model_checkpoint
        target = output_dir / checkpoint.folder_name(done)
        if better:
            state.best_model_checkpoint = str(target)
        earlier = self.folders
        self.folders = [*(path for path in earlier if path != target), target]  # the checkpoint names itself too
        try:
            write = self._prepare(output_dir, done)
        except BaseException as error:
            self.folders, state.best_model_checkpoint = earlier, before
            self._accept(error)
            return
        self.folders = earlier
        if self._buffers is None:
            write.run()
            self._land(write)
            return
        thread = threading.Thread(target=write.run, name=f"whet-save-{done}")
        self._flight = (thread, write)
        thread.start()

    def check(self) -> None:
        """Take note of a write behind that has ended; raises what became of it."""
        if self._flight is not None and not self._flight[0].is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is on its way any more; raises StorageError where that failed."""
        if self._flight is None:
            return
        thread, write = self._flight
        thread.join()
        self._flight = None
        self._land(write)

    def close(self) -> None:
        """Wait at the end of a run, however it ends: an error of its own is not hidden by one of the last write."""
        try:
            self.wait()
        except StorageError as error:
            logger.error("%s", error)

    def _prepare(self, output_dir: Path, done: int) -> Write:
        """Gather what the checkpoint holds, with its small files already in the staging folder."""
        content = snapshot.take(self.run_state, self._buffers)
        args, meter = self._run.args, self.run_state.meter
        staged = checkpoint.Staged(output_dir, done, self.line)
        staged.put(content.write_texts)
        facts = {
            "n_ranks": self.n_ranks,
            "seed": args.seed,
            "n_rows": meter.n_rows_before + meter.n_rows,
            "config_digest": compare.config_digest(args, self.run_state.identity),
        }
        return Write(staged, content, facts, self.folders[:-1], args.save_total_limit, self._protected())

    def _protected(self) -> Path | None:
        best = self._counters.best_model_checkpoint
        if not best or not self._run.args.load_best_model_at_end:
            return None
        return Path(best) if Path(best).parent == self._run.output_dir else None

    def _land(self, write: Write) -> None:
        target, state = write.staged.target, self._counters
        known = [*(path for path in self.folders if path != target), target]
        self.folders = sorted((path for path in known if _is_there(path, write)), key=checkpoint.step_of)
        if write.error is not None:
            if state.best_model_checkpoint == str(target):
                state.best_model_checkpoint = None
            self._accept(write.error)
            return
        logger.info("saved %s", target)
        self.on_saved()

    def _accept(self, error: BaseException) -> None:
        """Go on without the checkpoint where that is the policy; raise the error otherwise."""
        if not isinstance(error, StorageError):
            raise error
        if self._run.args.save_error_policy == "stop":
            raise disk_errors.resumable(error, self.last, self.next_start()) from error
        logger.warning("training goes on without this checkpoint: %s", error)


def _is_there(path: Path, write: Write) -> bool:
    """Return whether the checkpoint is there after this write; where the disk does not tell, as far as is known."""
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:
        return path != write.staged.target or write.error is None
