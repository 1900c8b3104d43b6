"""Writing, moving and removing checkpoint folders; every step is safe against a kill and a power cut.

A checkpoint is written to a hidden staging folder, synced, sealed by a manifest of checksums, then renamed. A folder is
renamed to a hidden name before it is deleted, so no half-deleted folder has the name of a checkpoint. What a kill
leaves behind is finished or undone when the next run begins.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from whet.console import amount
from whet.errors import OutputError, StorageError, WhetError
from whet.log import logger
from whet.store import find, manifest
from whet.store.find import Checkpoint, Lineage, read_checkpoints
from whet.system import fsync, rename

MODEL_STAGING = ".model.partial"
"""Where a model is written before its files are moved to the output folder."""
_TENSORS = ".safetensors"
_UNFINISHED = re.compile(r"\.checkpoint-(\d{1,18})\.(?:partial|replaced)")
_MOST_NAMED = 3
_E = TypeVar("_E", bound=WhetError)


# ---- a new checkpoint ----


def save(
    output_dir: Path,
    step: int,
    write: Callable[[Path], None],
    facts: Mapping[str, Any],
    lineage: Lineage | None = None,
) -> Path:
    """Write a checkpoint: `write(folder)` writes the files; the folder gets its name only when it is complete.

    Raises StorageError (exit 74) if writing fails; the staging folder is removed, earlier checkpoints stay.
    """
    staged = Staged(output_dir, step, lineage)
    staged.put(write)
    return staged.publish(facts)


class Renames:
    """Renames of folders that follow each other, and can be undone until they are kept."""

    def __init__(self) -> None:
        self._done: list[tuple[Path, Path]] = []

    def move(self, old: Path, new: Path) -> None:
        """Rename a folder."""
        rename(old, new)
        self._done.append((old, new))

    def put_in_place(self, folder: Path, target: Path, aside: Path) -> bool:
        """Give the folder the name `target`; return whether one had it, which is now at `aside`, to be deleted."""
        replaces = target.is_dir() and not target.is_symlink()
        if replaces:
            self.move(target, aside)
        self.move(folder, target)
        fsync(target.parent.resolve())  # the folder may be named by a link; nothing in it may be one
        return replaces

    def keep(self) -> None:
        """Let what was renamed stay so."""
        self._done = []

    def undo(self) -> None:
        """Give everything its old name back, the last first."""
        for old, new in reversed(self._done):
            with suppress(OSError):
                new.rename(old)
                _remove_if_empty(new.parent)
        self.keep()


class Staged:
    """A checkpoint that is being written, under a hidden name until it is published. An error removes it."""

    def __init__(
        self,
        output_dir: Path,
        step: int,
        lineage: Lineage | None = None,
        *,
        name: str | None = None,
        leaves_others: bool = False,
    ) -> None:
        """Publishing moves checkpoints aside that do not belong to `lineage`, unless it is None.

        With `leaves_others` it moves only one that has the name of the new one, and removes nothing of earlier runs.
        `name` is that of a saved state which is no checkpoint of a run.
        """
        self.step = step
        self.lineage = lineage
        self._leaves_others = leaves_others
        self.target = output_dir / (name or find.folder_name(step))
        self.folder = find.hidden(self.target, "partial")
        """Where the files are collected."""
        self._is_of_run = name is None
        self._replaced = find.hidden(self.target, "replaced")
        self._renames = Renames()
        with self._all_or_nothing():
            self._make_room(output_dir)

    def put(self, write: Callable[[Path], None]) -> None:
        """Call `write(folder)`, which writes files to the staging folder."""
        with self._all_or_nothing():
            write(self.folder)

    def publish(self, facts: Mapping[str, Any], written_by: Lineage | None = None) -> Path:
        """Seal the files and rename the folder; return it after the files were read back and are intact.

        An older checkpoint of the same step is moved aside, and deleted only after every byte of the new one was read.
        """
        origin = written_by or self.lineage
        content = {**facts, **(origin.facts() if origin else {})}
        with self._all_or_nothing():
            manifest.seal(self.folder, self.step, content)
            aside = self._set_others_aside()
            replaces = self._renames.put_in_place(self.folder, self.target, self._replaced)
            if problems := manifest.problems_of(self.target, self.step, light=not replaces):
                raise OSError("; ".join(problems))
        self._renames.keep()
        if replaces:
            _delete(self._replaced)
        try:  # the checkpoint is published: what the disk does not say of others changes nothing in that
            self._tidy_up(aside, facts.get(manifest.BEGINS_WITH))
        except OSError as error:
            logger.warning("what earlier runs have left in %s cannot be read: %s", self.target.parent, error)
        return self.target

    def discard(self) -> None:
        """Remove what was collected, and give everything that was moved its name back; nothing once it is published."""
        self._renames.undo()
        _remove_leftover(self.folder)

    def _tidy_up(self, aside: Sequence[Path], begins_with: str | None) -> None:
        """Remove what is left of earlier runs whose steps others hold, and log what stays of what was moved aside."""
        if self.lineage is not None and not self._leaves_others:
            _discard_held(self.target.parent, self.lineage, begins_with)
        kept = [one for one in aside if one.is_dir()]
        if kept:
            logger.warning(
                "checkpoints that this run does not continue are kept, but auto never resumes from them; delete those "
                "that you do not need: %s",
                ", ".join(f"{one} ({amount(_n_bytes(one))})" for one in kept),
            )

    def _set_others_aside(self) -> list[Path]:
        """Move the checkpoints of other lineages into folders named for these, and return their new paths.

        The highest step is moved last: if this is interrupted, the newest checkpoint is that of the old lineage or the
        parent.
        """
        if self.lineage is None:
            return []
        moved = []
        folders = [self.target] if self._leaves_others else find.list_all(self.target.parent)
        for one in read_checkpoints(folders):
            if not self.lineage.includes(one.lineage.run, one.step):
                place = _abandoned_path(one)
                place.parent.mkdir(exist_ok=True)
                self._renames.move(one.folder, place)
                fsync(place.parent)
                fsync(self.target.parent.resolve())
                moved.append(place)
        return moved

    def _make_room(self, output_dir: Path) -> None:
        if not output_dir.is_dir():
            output_dir.mkdir(parents=True)
            fsync(output_dir.parent.resolve())
        _remove_leftover(self.folder)
        finish_replacement(self.target)
        self.folder.mkdir()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError | SafetensorError):
                raise
            fix = disk_fix(error, self.target.parent)
            if not self._is_of_run:
                raise StorageError(
                    what=f"the state cannot be written to {self.target}",
                    got=str(error),
                    why="a state counts only when all of it is on the disk; an earlier one there is untouched",
                    fix=fix,
                ) from error
            raise StorageError(
                what=f"the checkpoint of step {self.step} cannot be written",
                got=str(error),
                why="a checkpoint counts only when all of it is on the disk; earlier ones are untouched",
                fix=f"{fix}; --save_total_limit keeps fewer checkpoints, and --save_error_policy continue trains "
                "without this one",
            ) from error


def copy(folder: Path, output_dir: Path, lineage: Lineage) -> Path:
    """Copy an intact checkpoint to the output folder of a run that resumed from it; return the copy."""
    (there,) = read_checkpoints([folder])

    def write(staging: Path) -> None:
        shutil.copytree(folder, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(manifest.MANIFEST))

    known = manifest.facts_of(folder) or {}
    facts = {name: value for name, value in known.items() if name not in ("step", *find.FACTS)}
    staged = Staged(output_dir, there.step, lineage)
    staged.put(write)
    return staged.publish(facts, there.lineage)


def _abandoned_path(one: Checkpoint) -> Path:
    """Return the new path of an abandoned checkpoint: in a folder named for its lineage, and not yet taken."""
    base = one.folder.with_name(f"{find.ASIDE}-{one.lineage.name}")
    for number in itertools.count(1):
        place = base if number == 1 else base.with_name(f"{base.name}-{number}")
        free = not os.path.lexists(place) or (place.is_dir() and not place.is_symlink())
        if free and not os.path.lexists(place / one.folder.name):
            return place / one.folder.name
    raise AssertionError


# ---- names that are taken ----


def require_free_names(output_dir: Path, *, after: int = 0, last: int | None = None) -> None:
    """Raise OutputError (exit 73) for a link or file at the name of a checkpoint of a later step than `after`.

    `last` is the last step of the run; None: it is not known yet.
    """
    in_the_way = [path for step, path in _strange(output_dir) if step > after and (last is None or step <= last)]
    if not in_the_way:
        return
    words = " ".join(shlex.quote(str(path)) for path in in_the_way[:_MOST_NAMED])
    more = len(in_the_way) - _MOST_NAMED
    raise OutputError(
        what="a future checkpoint cannot get its name: something is there already",
        got="; ".join(map(_described, in_the_way[:_MOST_NAMED])) + (f"; and {more} more" if more > 0 else ""),
        why="whet creates a folder for each checkpoint; it replaces nothing else, and never writes through a link",
        fix=f"move it away: mv {words} ELSEWHERE; or use another --output_dir",
    )


def _strange(output_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) for files and links with the name of a checkpoint, or of one that is being written."""
    try:
        there = sorted(output_dir.iterdir())
    except OSError:  # is reported when the run writes there
        return
    for path in there:
        named = find.NAME.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)
        if named and (path.is_symlink() or not path.is_dir()):
            yield int(named[1]), path


def _described(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}"  # noqa: PTH115 - as it stands there
    return f"{path} is a file" if path.is_file() else f"{path} is neither a file nor a folder"


# ---- after a kill ----


def clean_up(output_dir: Path) -> None:
    """Remove what a killed run left half written or half deleted, and finish or undo a replacement."""
    if not output_dir.is_dir():
        return
    for path in sorted(output_dir.iterdir()):
        match = find.HIDDEN.fullmatch(path.name)
        if match is not None and match.group(2) == "replaced":
            finish_replacement(output_dir / match.group(1))
        elif match is not None or path.name == MODEL_STAGING:
            _remove_leftover(path)


def finish_replacement(place: Path) -> None:
    """Finish a replacement that a kill interrupted: keep the new checkpoint if it is intact, else the old one.

    If both are damaged, the one with the checkpoint's name stays.
    """
    replaced = find.hidden(place, "replaced")
    odd = replaced.is_symlink() or place.is_symlink() or (place.exists() and not place.is_dir())
    if odd or not replaced.is_dir():
        return
    with suppress(OSError):  # both stay then, and the next run tries again
        if not find.problems_of(replaced) and (not place.exists() or find.problems_of(place)):
            if place.exists():
                remove(place)
            rename(replaced, place)
        else:
            fsync(place.parent.resolve())  # without it, a power cut could undo the rename after the old one is deleted
            shutil.rmtree(replaced)


# ---- checkpoints that go ----


def rotate(folders: Sequence[Path], keep: int | None, protected: Path | None) -> None:
    """Remove the oldest checkpoints of one run beyond `keep`; the protected one and the newest always stay.

    `folders` are the checkpoints of the run, oldest step first. What cannot be removed stays, with a warning.
    """
    if keep is None:
        return
    folders = sorted(folders, key=find.step_of)
    kept = {path.name for path in folders[-max(keep, 1) :]}
    if protected is not None and protected.name not in kept and 1 < keep <= len(folders):
        kept.discard(folders[-keep].name)  # the best one counts towards `keep`, as in transformers
    if protected is not None:
        kept.add(protected.name)
    for folder in folders:
        if folder.name not in kept:
            remove(folder)


def remove_all(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run, with its abandoned ones; the log says how many."""
    folders = _all_in(output_dir)
    for folder in folders:
        remove(folder)
    for place in find.aside_folders(output_dir):
        _remove_if_empty(place)
    if folders:
        logger.info("removed %d checkpoints of an earlier run from %s", len(folders), output_dir)


def bytes_of_all(output_dir: Path) -> int:
    """Return the bytes that `remove_all` would free; a checkpoint whose manifest cannot be read does not count."""
    return sum(map(_n_bytes, _all_in(output_dir)))


def _all_in(output_dir: Path) -> list[Path]:
    places = (output_dir, *find.aside_folders(output_dir))
    return [path for place in places for path in find.list_all(place)]


def remove(folder: Path) -> None:
    """Remove a checkpoint; what cannot be removed stays, with a warning."""
    out_of_sight = find.hidden(folder, "removed")
    _remove_leftover(out_of_sight)
    try:
        rename(folder, out_of_sight)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)
        return
    _delete(out_of_sight)


def _delete(folder: Path) -> None:
    """Delete a hidden folder; what cannot be deleted now is deleted when the next run begins."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error)


def _remove_leftover(place: Path) -> None:
    """Remove a leftover folder. Anything else stays (rmtree would wait on a pipe), and the save fails."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder for abandoned checkpoints once it holds none."""
    if folder.name.startswith(f"{find.ASIDE}-"):
        with suppress(OSError):
            folder.rmdir()


def _discard_held(output_dir: Path, lineage: Lineage, begins_with: str | None) -> None:
    """Remove what is left of earlier runs whose steps other checkpoints hold; the log says how much.

    Of a run that shares no steps with this one, its last checkpoint and its best stay. They go as well if this run
    holds the same tensors, or if the earlier run had ended and this one began with its weights (`begins_with`).
    """
    removed, n_bytes = 0, 0
    for place in find.aside_folders(output_dir):
        there = [one for one in read_checkpoints(find.list_all(place)) if not find.problems_of(one.folder, light=True)]
        if not there or any(lineage.shares_steps_with(one.lineage) for one in there):
            continue
        last = max(there, key=lambda one: one.step).folder
        kept = set() if _is_held(last, output_dir, begins_with) else {last.name, _best_named_in(last)}
        for folder in (one.folder for one in there if one.folder.name not in kept):
            removed, n_bytes = removed + 1, n_bytes + _n_bytes(folder)
            remove(folder)
        _remove_if_empty(place)
    if removed:
        logger.info("removed %d checkpoints of an earlier run (%s): others hold their steps", removed, amount(n_bytes))


def _is_held(last: Path, output_dir: Path, begins_with: str | None) -> bool:
    """Return whether a run holds all that an earlier one, whose last checkpoint this is, came to."""
    facts, own = manifest.facts_of(last) or {}, _tensors(last)
    if facts.get(manifest.FINISHED) and begins_with is not None and facts.get(manifest.WEIGHTS) == begins_with:
        return True
    return any(path.name == last.name and _tensors(path) == own for path in find.list_all(output_dir))


def _best_named_in(folder: Path) -> str | None:
    """Return the name of the best checkpoint; its state has a path if `whet.Trainer` has written it."""
    state = folder / find.TRAINER_STATE
    best = json.loads(state.read_text("utf-8")).get("best_model_checkpoint") if state.is_file() else None
    return Path(best).name if isinstance(best, str) else None


def _tensors(folder: Path) -> dict[str, str]:
    """Return the checksum of each file of tensors of a checkpoint."""
    files = manifest.sealed_files(folder)
    return {name: checksum for name, (_, checksum) in files.items() if name.endswith(_TENSORS)}


def _n_bytes(folder: Path) -> int:
    return sum(size for size, _ in manifest.sealed_files(folder).values())


# ---- errors of the disk ----

_IN_TEXT = re.compile(r"os error (\d+)")
"""How Rust libraries write the number of a system error."""
_ANOTHER = "use an {option} on another disk"
_FULL = "free space on the disk of {folder}{free}, or " + _ANOTHER
_FIXES: Mapping[int, str] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "the quota of this user is used up (quota -s shows it): delete files of yours, or " + _ANOTHER,
    errno.EFBIG: "no file may grow so large here: lift the limit of this shell (ulimit -f unlimited), or if it has "
    "none, " + _ANOTHER,
    errno.EROFS: "the disk of {folder} is mounted read-only, perhaps after errors (mount shows it): " + _ANOTHER,
    errno.EACCES: "let this user write there (ls -ld {quoted} shows who may), or use another {option}",
    errno.EIO: "the disk of {folder} fails (see dmesg): " + _ANOTHER,
    errno.ENAMETOOLONG: "use a shorter {option}",
    errno.EMFILE: "too many files are open: raise the limit of this shell (ulimit -n)",
    errno.ENOENT: "{folder} was moved or removed while the run used it: put it back, or use another {option}",
    errno.ESTALE: "the network folder of {folder} was lost: mount it again, or " + _ANOTHER,
}
_SAME = {
    errno.EPERM: errno.EACCES, errno.ENFILE: errno.EMFILE, errno.ENODEV: errno.ESTALE, errno.ENXIO: errno.ESTALE,
    errno.ETIMEDOUT: errno.ESTALE, errno.EHOSTDOWN: errno.ESTALE, errno.ENOTCONN: errno.ESTALE,
}  # fmt: skip
_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY}


def disk_fix(error: BaseException, folder: Path, option: str = "--output_dir") -> str:
    """Return what helps when writing to the folder, which `option` names, failed with this error."""
    reason = _reason(error)
    if reason in _IN_THE_WAY:
        return f"move away what is at {_place(error, folder)}, or use another {option}"
    text = _FIXES.get(_SAME.get(reason, reason), _FULL)
    return text.format(folder=folder, option=option, quoted=shlex.quote(str(folder)), free=_free(folder))


def resumable(error: _E, last: Path | None, again: Mapping[str, object]) -> _E:
    """Return the error with the newest complete checkpoint, if there is one, and the settings that resume from it."""
    (problem,) = error.problems
    if last is None:
        kept, then = "there is no checkpoint to resume from", "then start again with the same command"
    else:
        kept = f"the newest complete checkpoint is {last}"
        then = f"then resume with --resume_from_checkpoint {shlex.quote(str(last))}"
    why, fix = f"{problem.why}; {kept}", f"{problem.fix}; {then}"
    extended = type(error)(what=problem.what, got=problem.got, why=why, fix=fix)
    extended.again = dict(again) if last is not None else {}
    return extended


def _reason(error: BaseException) -> int:
    """Return the number of the system error; 0 if it is none."""
    number = getattr(error, "errno", None)
    found = _IN_TEXT.search(str(error))
    return number or (int(found[1]) if found else 0)


def _place(error: BaseException, folder: Path) -> str:
    names = [getattr(error, name, None) for name in ("filename2", "filename")]
    found = next((os.fsdecode(name) for name in names if isinstance(name, str | bytes | Path)), str(folder))
    return shlex.quote(found)


def _free(folder: Path) -> str:
    """Return how much is free there, in brackets; empty if that is unknown."""
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free)"
    except OSError:
        return ""
