"""What a disk may hold after a power cut: a model, in Python, of what POSIX promises; no real hardware.

Promised: data of a file that was synced after its last change, names in a folder that was synced after theirs. All
else may be there or be lost, and data may be cut short or zeroed. A rename happens as a whole or not at all.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ACTIVE: list[Log] = []


@dataclass(frozen=True)
class Event:
    """One change of the disk: `kind` is data, sync, mkdir, rename, remove or rmdir; paths are relative."""

    kind: str
    path: str
    other: str = ""
    content: bytes = b""


@dataclass
class Log:
    """The changes below a folder, in their order."""

    root: Path
    events: list[Event] = field(default_factory=list)
    _known: dict[str, bytes] = field(default_factory=dict)

    def look(self) -> None:
        """Note files that are new or changed since the last look: data on its way to the disk."""
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_file() and self._known.get(name) != (content := path.read_bytes()):
                self._known[name] = content
                self.events.append(Event("data", name, content=content))

    def note(self, kind: str, path: Any, other: Any = "") -> None:
        """Note a change, after what was written before it."""
        places = [Path.cwd() / os.fspath(one) for one in (path, other or path)]
        if not all(place.is_relative_to(self.root) for place in places):
            return
        self.look()
        first, second = (str(place.relative_to(self.root)) for place in places)
        self.events.append(Event(kind, first, second if other else ""))
        if kind == "rename":
            moved = {name: name for name in self._known if name == first or name.startswith(f"{first}/")}
            for name in moved:
                self._known[second + name[len(first) :]] = self._known.pop(name)
        if kind == "remove":
            self._known.pop(first, None)


@contextmanager
def recorded(root: Path) -> Iterator[Log]:
    """Record what happens below the folder during the block; what is there before counts as being on the disk."""
    log = Log(root.resolve())
    log.look()
    log.events.clear()
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        log.note("sync", Path(f"/proc/self/fd/{handle}").readlink())

    os.fsync = fsync
    _ACTIVE.append(log)
    try:
        yield log
        log.look()
    finally:
        _ACTIVE.remove(log)
        os.fsync = real


def _watch(name: str, given: tuple[Any, ...]) -> None:
    kinds = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir"}
    for log in _ACTIVE:
        if name in kinds and not isinstance(given[0], int):
            path, other = given[0], given[1] if name == "os.rename" else ""
            folder = given[1] if name in ("os.remove", "os.rmdir") else -1
            if isinstance(folder, int) and folder >= 0:  # removed relative to an open folder
                path = Path(f"/proc/self/fd/{folder}").readlink() / os.fspath(path)
            log.note(kinds[name], path, other)


sys.addaudithook(_watch)


def crash_state(log: Log, before: Callable[[Path], Any], place: Path, chance: random.Random) -> str:
    """Put one state that a crash may leave into `place`, where `before` has put what was there; return it in words."""
    before(place)
    end = chance.randrange(len(log.events) + 1)
    done = log.events[:end]
    lost = 0
    for index, event in enumerate(done):
        kept = _is_promised(event, done[index + 1 :]) or chance.random() < 0.5
        lost += not kept
        if event.kind == "data":
            _put_data(place / event.path, event.content, whole=kept, chance=chance)
        elif kept:
            _apply(place, event)
    return f"{end} of {len(log.events)} events, {lost} lost"


def _is_promised(event: Event, after: list[Event]) -> bool:
    """Return whether a later sync makes the change last: of the file for data, of the folder for names."""
    if event.kind == "sync":
        return True
    path = event.path
    for later in after:
        if later.kind == "rename" and (path == later.path or path.startswith(f"{later.path}/")):
            path = later.other + path[len(later.path) :]
        wanted = {path} if event.kind == "data" else {_parent(event.other or event.path), _parent(path)}
        if later.kind == "sync" and later.path in wanted:
            return True
    return False


def _parent(path: str) -> str:
    return str(Path(path).parent)


def _put_data(path: Path, content: bytes, *, whole: bool, chance: random.Random) -> None:
    if not path.parent.is_dir():
        return
    kind = "whole" if whole else chance.choice(["nothing", "empty", "cut", "zeros", "whole"])
    if kind == "nothing":
        return
    cut = content[: chance.randrange(len(content) + 1)]
    path.write_bytes({"whole": content, "empty": b"", "cut": cut, "zeros": bytes(len(content))}[kind])


def _apply(place: Path, event: Event) -> None:
    """Do what the event did, where what it needs is there."""
    path = place / event.path
    try:
        if event.kind == "mkdir":
            path.mkdir()
        elif event.kind == "rename":
            path.rename(place / event.other)
        elif event.kind == "remove":
            path.unlink()
        elif event.kind == "rmdir":
            path.rmdir()
    except OSError:
        return
