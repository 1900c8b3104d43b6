"""When and how a run saves: synchronously or in the background, with rotation and the handling of errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from whet.config.ranks import ALONE, LostRankError, Place
from whet.errors import StorageError, WhetError
from whet.log import logger
from whet.models import finite
from whet.store import compare, find, manifest, schema, snapshot, write
from whet.store.find import Lineage, lineage_in, new_lineage
from whet.store.snapshot import RunState
from whet.store.state import State

T = TypeVar("T")
_NAMES = schema.list_of(schema.text)


class Ranks:
    """How the ranks of a run agree: all of them call each method at the same points of the run.

    This is the only rank, or one that is left alone. `engine/many_ranks.py` has the one of several.
    """

    n_ranks = 1
    place: Place = ALONE

    def of_first(self, value: T, valid: schema.Check) -> T:
        """Return the value of rank 0: JSON or arrays of which `valid` holds, or the run ends."""
        return value

    def gather(self, value: T, valid: schema.Check, *, large: bool = False) -> list[T]:
        """Return the values of all ranks: JSON or arrays of which `valid` holds, or the run ends."""
        return [value]

    def wait(self) -> None:
        """Wait for all ranks."""


@dataclass
class Write:
    """The write of one checkpoint; `run` reads nothing that the training loop changes."""

    staged: write.Staged
    content: snapshot.Snapshot
    facts: dict[str, Any]
    earlier: Sequence[Path]
    keep: int | None
    protected: Path | None
    error: BaseException | None = None

    def run(self) -> None:
        """Write and publish the checkpoint, then remove those beyond the limit; an error is kept in `error`."""
        try:
            self.staged.put(self.content.write_tensors)
            self.staged.publish(self.facts)
            write.rotate([*self.earlier, self.staged.target], self.keep, self.protected)
        except BaseException as error:
            self.error = error


@dataclass
class Saver:
    """Writes the checkpoints of one run; `folders` are those that exist, oldest first."""

    run_state: RunState
    on_saved: Callable[[Path], None]
    """Called with the folder of each checkpoint that was written."""
    sync: Ranks = field(default_factory=Ranks)
    """Rank 0 writes; the others learn what became of it."""
    folders: list[Path] = field(default_factory=list)
    lineage: Lineage = field(init=False)
    """The lineage of its checkpoints."""
    begins_with: str | None = None
    """A checksum of the weights before the first step of the run."""
    resumed_from: Path | None = None
    training: find.Training = field(default_factory=find.Training)
    """Which of the trainings in the output folder this is."""
    _last_s: float = field(default_factory=lambda: time.monotonic())
    _buffers: snapshot.Buffers | None = None
    _in_progress: tuple[threading.Thread | None, Path, Write | None] | None = None
    """The write in the background: its thread and the write on rank 0, and the checkpoint."""
    _begun: Path | None = None
    """The checkpoint that the ranks began to write last, whatever became of it."""

    def __post_init__(self) -> None:
        self._run, self._counters = self.run_state.run, self.run_state.counters
        self.lineage = self._lineage_of_first(new_lineage(self.training))
        if self._run.args.save_async:
            self._buffers = snapshot.Buffers()

    def resume(self, folder: Path, *, named: bool = False) -> None:
        """Remember where the run resumes from, and whether it stays in that lineage or begins a new one."""
        self.resumed_from = folder
        self.begins_with = (manifest.facts_of(folder) or {}).get(manifest.BEGINS_WITH)
        own = find.lineage_after_resume(folder, self._run.output_dir, self.training, named=named)
        self.lineage = self._lineage_of_first(own)

    def _of_all(self, names: list[str]) -> list[list[str]]:
        return self.sync.gather(names, _NAMES)

    def _lineage_of_first(self, own: Lineage) -> Lineage:
        return lineage_in(self.sync.of_first(own.facts(), schema.json_object))

    def _folders_of_first(self, own: Sequence[Path]) -> list[Path]:
        return [Path(name) for name in self.sync.of_first([*map(str, own)], _NAMES)]

    @property
    def last(self) -> Path | None:
        """The checkpoint that this run would resume from; None if it saved none that can be resumed from."""
        complete = (path for path in reversed(self.folders) if not manifest.holds_only_model(path))
        return next(complete, self.resumed_from)

    def settings_to_resume(self) -> dict[str, object]:
        """Return the setting that resumes from the last checkpoint of this run; no setting if nothing is saved."""
        last = self.last
        newest = find.would_resume(self._run.output_dir)
        if newest is None and last is None:
            return {"resume_from_checkpoint": "auto"}
        if newest is not None and last is not None and newest.absolute() == last.absolute():
            return {"resume_from_checkpoint": "auto"}
        return {"resume_from_checkpoint": str(last)} if last is not None else {}

    def state(self) -> State:
        """Return the names of the run's checkpoints."""
        return {"names": [path.name for path in self.folders]}

    def load_state(self, saved: State) -> None:
        """Take over the checkpoints of the run before it stopped; none is removed before `rotate`."""
        schema.require_all(saved, {"names": _NAMES}, "checkpoints")
        self.folders = self._folders_of_first(self._own(saved["names"]) if self.sync.place.is_first else [])

    def rotate(self) -> None:
        """Remove the checkpoints beyond the limit: a kill may have come between a save and its rotation.

        The counters must be restored by now, as they name the best checkpoint, which stays.
        """
        if self.sync.place.is_first:
            write.rotate(self.folders, self._run.args.save_total_limit, self._protected())
        self.sync.wait()  # for a slow disk
        there = [path for path in self.folders if path.is_dir() and not path.is_symlink()]
        self.folders = self._folders_of_first(there)

    def _own(self, names: Sequence[str]) -> list[Path]:
        """Return the run's checkpoints that are still there; none if it resumes in another folder."""
        output_dir, folder = self._run.output_dir, self.resumed_from
        if folder is None or folder.resolve().parent != output_dir.resolve():
            return []
        wanted = {folder.name, *names}
        return find.of_lineage([path for path in find.list_all(output_dir) if path.name in wanted], self.lineage)

    def due(self, done: int, *, epoch_ends: bool, complete: bool, better: bool) -> bool:
        """Return whether to save after `done` steps; strategies steps and time always save the last step."""
        interval = self._run.plan.save
        if interval.strategy == "best":
            return better
        if interval.strategy == "time":
            return complete or time.monotonic() - self._last_s >= self._run.args.save_interval_s
        return interval.due(done, epoch_ends) or (complete and interval.strategy == "steps")

    def has(self, folder: Path) -> bool:
        """Return whether this checkpoint was written and a run can resume from it."""
        return folder in self.folders and not manifest.holds_only_model(folder)

    def save(self, done: int, *, better: bool, stops: bool = False) -> None:
        """Write the checkpoint of this step, or start to; raises StorageError if `save_error_policy` is stop.

        A run that `stops` writes a complete checkpoint, even with `save_only_model`.
        """
        self.wait()  # at most one write at a time
        with self.run_state.to_save():
            self._save(done, better=better, stops=stops)

    def _save(self, done: int, *, better: bool, stops: bool) -> None:
        finite.require_finite(self._run.model, self.run_state.optimizer, f"after step {done}", self._of_all)
        self._last_s = time.monotonic()
        output_dir, state = self._run.output_dir, self._counters
        before = state.best_model_checkpoint
        target = output_dir / find.folder_name(done)
        if better:
            state.best_model_checkpoint = str(target)
        earlier = self.folders
        self.folders = [*(path for path in earlier if path != target), target]  # the checkpoint lists itself too
        job, error, only_model = None, None, self._run.args.save_only_model and not stops
        if self.sync.place.is_first:
            try:
                job = self._prepare(output_dir, done, only_model=only_model)
            except StorageError as caught:
                error = caught
            except BaseException:
                self.folders, state.best_model_checkpoint = earlier, before
                raise
        elif not only_model:
            self._send()
        self.folders = earlier
        try:
            self.sync.wait()  # for a slow disk
            error = self._of_first(error)
        except LostRankError:
            if job is not None:
                self._write_alone(job)
            raise
        if error is not None:
            state.best_model_checkpoint = before
            self._continue_or_raise(error)
            return
        self._begun = target
        if self._buffers is None:
            if job is not None:
                job.run()
            self._finish_write(target, job)
            return
        thread = None if job is None else threading.Thread(target=job.run, name=f"whet-save-{done}")
        self._in_progress = (thread, target, job)
        if thread is not None:
            thread.start()

    def _send(self) -> None:
        """Send rank 0 what this rank holds alone, while rank 0 prepares the write."""
        for part in self.run_state.parts().values():
            if (pieces := snapshot.pieces_of(part)) is not None:
                snapshot.exhaust(pieces)

    def _write_alone(self, job: Write) -> None:
        """Write what rank 0 has prepared though another rank is lost; `saved_alone` looks whether it is there."""
        self._begun = job.staged.target
        job.run()
        if job.error is not None and not isinstance(job.error, StorageError):
            raise job.error
        if job.error is not None:
            logger.error("%s", job.error)

    def check(self) -> None:
        """Finish a background write that has ended; raises its error. Several ranks do so before they save again."""
        thread = None if self._in_progress is None else self._in_progress[0]
        if self.sync.n_ranks == 1 and thread is not None and not thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write in the background; raises StorageError if it failed."""
        if self._in_progress is None:
            return
        thread, target, job = self._in_progress
        if thread is not None:
            thread.join()
        self._in_progress = None
        self._finish_write(target, job)

    def close(self) -> None:
        """Wait at the end of a run; log an error of the last write, so that it does not hide the error of the run."""
        if self._in_progress is not None:  # other ranks may be gone, or wait for something else
            self.sync = Ranks()
            self._in_progress = self._in_progress if self._in_progress[0] is not None else None
        try:
            self.wait()
        except StorageError as error:
            logger.error("%s", error)

    def saved_alone(self, lost: LostRankError) -> LostRankError:
        """Save the finished steps on rank 0 after another rank was lost; return the error, with the folder."""
        done, place = self._counters.global_step, self.sync.place
        self.sync = Ranks()
        if not place.is_first:
            self._in_progress = None
        target = self._run.output_dir / find.folder_name(done)
        if not place.is_first or not done or self.has(target) or self._run.args.save_strategy == "no":
            return lost
        newest = self._newest_written(target)
        if newest == target:
            return LostRankError(lost.place, lost.doing, lost.error, f": step {done} is saved in {target}")
        if self.run_state.is_shared():
            unsaved = "nothing is saved" if newest is None else f"the steps after {newest} are not saved"
            unsaved = f": {unsaved}, as the other rank had a part of the state"
            return LostRankError(lost.place, lost.doing, lost.error, unsaved)
        self.run_state.optimizer.zero_grad(set_to_none=True)
        try:
            self.save(done, better=False, stops=True)
            self.wait()
        except WhetError as error:
            logger.error("%s", error)
        if not self.has(target):
            return lost
        return LostRankError(lost.place, lost.doing, lost.error, f": step {done} is saved in {target}")

    def _newest_written(self, target: Path) -> Path | None:
        """Return the newest complete checkpoint of this run; `target` is one that the ranks may have been saving."""
        if self._in_progress is not None and self._in_progress[0] is not None:
            self._in_progress[0].join()
        known = [target, self._begun, *reversed(self.folders), self.resumed_from]
        complete = (one for one in known if one is not None and not find.problems_of(one, light=True))
        return next((one for one in complete if not manifest.holds_only_model(one)), None)

    def _prepare(self, output_dir: Path, done: int, *, only_model: bool) -> Write:
        """Collect the content of the checkpoint; write small files, and what other ranks send, to the staging folder.

        From then on the checkpoint needs this rank alone.
        """
        content = snapshot.take(self.run_state, self._buffers, only_model=only_model)
        try:
            staged = write.Staged(output_dir, done, self.lineage)
            staged.put(content.write_texts)
            staged.put(content.write_incoming)
        except Exception:  # Ctrl-C waits for nobody
            content.drain()
            raise
        args, meter, settings = self._run.args, self.run_state.meter, json.loads(self.run_state.settings)
        facts = {
            "n_ranks": self._run.place.n_ranks,
            "seed": args.seed,
            "n_rows": meter.n_rows_before + meter.n_rows,
            "config_digest": compare.config_digest(settings, self._run.place.n_ranks, self.run_state.identity),
            manifest.WEIGHTS: compare.digest_of_weights(content.weights.items()),
            manifest.FINISHED: done >= self._run.plan.n_steps,
        }
        if self.begins_with is not None:
            facts[manifest.BEGINS_WITH] = self.begins_with
        if only_model:
            facts[manifest.ONLY_MODEL] = True
        return Write(staged, content, facts, self.folders[:-1], args.save_total_limit, self._protected())

    def _protected(self) -> Path | None:
        best = self._counters.best_model_checkpoint
        if not best or not self._run.args.load_best_model_at_end:
            return None
        return Path(best) if Path(best).parent == self._run.output_dir else None

    def _finish_write(self, target: Path, job: Write | None) -> None:
        """Note the outcome of a write, which all ranks learn from rank 0."""
        self.sync.wait()  # for a slow disk
        known = [*(path for path in self.folders if path != target), target]
        there = [] if job is None else [path for path in known if _is_there(path, job)]
        self.folders = self._folders_of_first(sorted(there, key=find.step_of))
        error = None if job is None else job.error
        if error is not None and not isinstance(error, StorageError):
            raise error
        if (error := self._of_first(error)) is not None:
            if self._counters.best_model_checkpoint == str(target):
                self._counters.best_model_checkpoint = None
            self._continue_or_raise(error)
            return
        logger.info("saved %s", target)
        self.on_saved(target)

    def _of_first(self, error: StorageError | None) -> StorageError | None:
        """Return the error of rank 0, on every rank."""
        if self.sync.n_ranks == 1:
            return error
        from whet.dist import messages

        own = None if error is None else messages.error_facts(error)
        of_first = self.sync.of_first(own, schema.optional(messages.is_error))
        if error is not None or of_first is None:
            return error
        return StorageError.of(messages.error_from(of_first).problems)  # pyright: ignore[reportReturnType]

    def _continue_or_raise(self, error: StorageError) -> None:
        """Continue without the checkpoint if `save_error_policy` says so; raise the error otherwise."""
        if self._run.args.save_error_policy == "stop":
            raise write.resumable(error, self.last, self.settings_to_resume()) from error
        logger.warning("training continues without this checkpoint: %s", error)


def _is_there(path: Path, job: Write) -> bool:
    """Return whether the checkpoint exists after this write; if the disk cannot be read, whether it should."""
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:
        return path != job.staged.target or job.error is None
