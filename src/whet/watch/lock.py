"""One run per output folder: a lock that the kernel releases when the process ends, even if it is killed.

Of several threads of a process one has it: a run locks its folder again in the thread that has locked it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from whet import system
from whet.config.ranks import elastic_run, here, n_machines, own_launches, restarted
from whet.config.rules.training import LAUNCH_NAME, LOCK_NAME, require_output_dir
from whet.errors import OutputError, WhetError
from whet.log import logger
from whet.watch import stop

_NO_RUN = "none"
"""torchrun's --rdzv_id of a job that has none."""
_NAMED_WITHIN_S = 0.5
"""The holder writes its name right after taking the lock; another process waits this long for the name."""
_LOOKED_AT_S = 0.02


@dataclass(frozen=True)
class _Held:
    handle: int
    thread: int
    """The thread whose run it is."""


_held: dict[tuple[int, int], _Held] = {}
"""Device and inode of each folder that this process has locked -> the lock."""


@contextlib.contextmanager
def output_folder(path: str | Path, overwrite: bool) -> Iterator[Path]:
    """Create the folder if it is missing, check that it can be written, and lock it for this run within the block.

    Folders that were created and stay empty are removed. Raises OutputError (exit 73) with the process and host of a
    run that has locked it, and what `require_output_dir` raises.
    """
    folder = Path(path)
    if not here().is_first:
        yield folder
        return
    refuse_taken(folder)
    absolute = folder.absolute()
    missing = [place for place in (absolute, *absolute.parents) if not os.path.lexists(place)]
    cleanup = lambda: _remove_empty(missing, absolute / LAUNCH_NAME)  # noqa: E731 - it is handed on
    stop.before_exit(cleanup)
    try:
        try:
            require_output_dir(folder, overwrite)
        except WhetError:
            refuse_taken(folder)  # what is in the way may be the first file of a run that has just taken it
            raise
        with locked(folder):
            taken = require_output_dir(folder, overwrite)  # another run may have begun and ended while this one waited
            note_launches(taken, own_launches())
            yield taken
            note_launches(taken, own_launches(), ended=True)
    finally:
        cleanup()


def note_launches(folder: Path, launches: Collection[str], *, ended: bool = False) -> None:
    """Note who has started the run in this folder, and whether it has ended: a restart then knows its own files.

    A launcher starts all ranks again if one of them fails after rank 0 has ended.
    """
    path = folder / LAUNCH_NAME
    with contextlib.suppress(OSError):  # a full disk is the error of the first save
        path.unlink(missing_ok=True)
        if launches:
            handle = system.open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(handle, "w") as file:
                facts = {"machines": n_machines(), "run": elastic_run(), "ended": ended}
                json.dump({"launches": sorted(launches), **facts}, file)


def may_be_of_this_launch(folder: Path) -> bool:
    """Return whether the launcher of this process may have started the run that has left its files in the folder.

    Each machine has a launcher of its own, and one that has joined since is known by torchrun's --rdzv_id alone.
    """
    try:
        found = json.loads((folder / LAUNCH_NAME).read_text("utf-8"))
        if not own_launches().isdisjoint(found["launches"]):
            return not found["ended"] or restarted()
        named = elastic_run() not in (None, _NO_RUN)
        return named and not found["ended"] and found["machines"] > 1 and found["run"] == elastic_run()
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this thread within the block; a folder that it has locked already is not locked twice."""
    folder = folder.absolute()  # the process may change its working directory; rank 0 locks it for all ranks
    place = _inode(folder)
    handle = None if _is_own(folder) or not here().is_first else _take(folder)
    if handle is None:
        yield
        return
    if not _held:
        _unlock_in_children()
    _held[place] = _Held(handle, threading.get_ident())
    release = lambda: _release(folder, place)  # noqa: E731 - it is handed on
    stop.before_exit(release)
    try:
        yield
    finally:
        release()


@contextlib.contextmanager
def locked_if_possible(folder: Path) -> Iterator[None]:
    """Lock the folder within the block. If it cannot be written, the first save reports that, not this lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        possible = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        possible = False
    with locked(folder) if possible else contextlib.nullcontext():
        yield


def _take(folder: Path) -> int | None:
    """Return the handle of the folder's lock; None if this file system has no locks."""
    path = folder / LOCK_NAME
    while True:
        handle = _open(path)
        try:
            _lock(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in system.LOCKED:
                raise _taken(folder) from error
            logger.warning("%s cannot be locked (%s): start no second run there", folder, error)
            return None
        if _is_open_file(handle, path):
            break
        os.close(handle)  # its holder removed it in the meantime
    with contextlib.suppress(OSError):  # on a full disk the lock works without the holder's name
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    return handle


def _lock(handle: int) -> None:
    """Take the lock or raise OSError; who only looks (`holder`) has it for a moment, so it is tried twice."""
    try:
        system.lock(handle)
    except OSError as error:
        if error.errno not in system.LOCKED:
            raise
        time.sleep(_LOOKED_AT_S)
        system.lock(handle)


def holder(folder: Path) -> tuple[int, str] | None:
    """Return the process and host of the run that has locked the folder, None if there is none; it changes nothing.

    (0, "") is a run that has not named itself. Runs of other machines are seen as far as the file system has locks.
    """
    path = folder / LOCK_NAME
    return _named(path) or (0, "") if _is_locked(path) else None


def killed(folder: Path) -> tuple[int, str] | None:
    """Return the process and host of the run that was killed while it had locked the folder, None if none is known.

    The kernel has released its lock, and nobody has removed the file. A process that has its number now is another one.
    """
    path = folder / LOCK_NAME
    return _named(path) if _is_locked(path) is False else None


def _is_locked(path: Path) -> bool | None:
    """Return whether a process has this lock; None if there is no such file, or the file system has no locks."""
    try:
        handle = system.open_plain(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        system.lock(handle, shared=True)
    except OSError as error:
        return True if error.errno in system.LOCKED else None
    finally:
        os.close(handle)
    return False


def _open(path: Path) -> int:
    try:
        return _own_file(system.open_plain(path, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        raise OutputError(
            what="output_dir cannot be locked",
            got=str(error),
            why="a run locks this file while it writes to the folder",
            fix=f"remove {path}, or use another --output_dir",
        ) from error


def _own_file(handle: int) -> int:
    """Return the handle of a plain file; raises OSError for a pipe, a device or a hard link."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise OSError(None, "it is not a plain file, or it is a hard link to another file")
    return handle


def _release(folder: Path, place: tuple[int, int]) -> None:
    held = _held.pop(place, None)
    if held is None:
        return
    handle = held.handle
    path = folder / LOCK_NAME
    if not system.removes_open_files():
        os.close(handle)
        with contextlib.suppress(OSError):  # a run that has just opened it keeps it
            path.unlink()
        return
    with contextlib.suppress(OSError):
        if _is_open_file(handle, path):
            path.unlink()
    os.close(handle)


def _is_open_file(handle: int, path: Path) -> bool:
    """Return whether the open file is still the one at this path."""
    if not system.removes_open_files():
        return True
    try:
        named = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(handle))


def refuse_taken(folder: Path) -> None:
    """Raise OutputError if another run has locked this folder."""
    try:
        handle = system.open_plain(folder / LOCK_NAME, os.O_RDWR)
    except (OSError, ValueError):
        return
    try:
        _lock(handle)
    except OSError as error:
        if error.errno in system.LOCKED and not _is_own(folder):
            raise _taken(folder) from error
    finally:
        os.close(handle)


def _is_own(folder: Path) -> bool:
    """Return whether this thread has locked the folder; raise OutputError if another one of this process has."""
    held = _held.get(_inode(folder))
    if held is not None and held.thread != threading.get_ident():
        raise _taken(folder)
    return held is not None


def _taken(folder: Path) -> OutputError:
    return OutputError(
        what="another run is writing to output_dir",
        got=f"{folder}, held by {_holder(folder / LOCK_NAME)}",
        why="two runs in one folder would overwrite each other's checkpoints",
        fix="use another --output_dir, or wait for that run, or end it",
    )


def _holder(path: Path) -> str:
    deadline = time.monotonic() + _NAMED_WITHIN_S
    while True:
        if (found := _named(path)) == (os.getpid(), socket.gethostname()):
            return "another thread of this process"
        if found is not None:
            return f"process {found[0]} on {found[1]!r}"
        if time.monotonic() > deadline:
            return "a process that has not named itself"
        time.sleep(0.01)


def _named(path: Path) -> tuple[int, str] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
        return int(found["pid"]), str(found["host"])[:255]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _inode(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _remove_empty(folders: list[Path], note: Path) -> None:
    """Remove the folders, innermost first, until one is not empty; the first may hold this note alone."""
    with contextlib.suppress(OSError):
        if folders and [*note.parent.iterdir()] == [note]:
            note.unlink()
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _unlock_in_children() -> None:
    """Make forked children close the inherited locks: a child may live longer than its parent."""
    global _handles_forks
    if not _handles_forks:
        _handles_forks = True
        system.after_fork(_close_inherited)


_handles_forks = False


def _close_inherited() -> None:
    for held in _held.values():
        os.close(held.handle)
    _held.clear()
