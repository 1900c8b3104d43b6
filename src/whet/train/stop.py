"""Signals that ask a run to stop: SIGTERM, SIGINT and SIGUSR1, each heard once, and heeded where nothing is lost.

The command line installs the handlers before anything heavy is imported. As long as nothing is worth saving a signal
ends the process at once; from `wait_for_edges` on it is only noted, and the run leaves where it asks `asked()`: between
two micro-batches, two batches of an evaluation, or after a save. In a library nothing is installed without being told
to: Ctrl-C stays the caller's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.errors import EXIT_STOPPED_AND_SAVED, ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_NOTHING_YET = "nothing was there to be saved; start again with the same command"


class Stopped(SystemExit):
    """The run has stopped as it was asked to, with exit code 75: no error, so no `except Exception` swallows it."""

    def __init__(self, what: str, again: Mapping[str, object], code: int = EXIT_STOPPED_AND_SAVED) -> None:
        super().__init__(code)
        self.what = what
        """What came, and what is saved where."""
        self.again = dict(again)
        """The settings that go on from there; none where the same settings do."""

    def __str__(self) -> str:
        return self.what


@dataclass
class _Listening:
    """What this process knows about signals."""

    asked: str | None = None
    """Name of the first signal that came."""
    at_edges: bool = False
    """Whether signals are only noted, as work in progress is worth saving."""
    reached: str = _NOTHING_YET
    again: Mapping[str, object] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)
    """Signal -> the handler that was there before; empty while nothing is installed."""
    pid: int = 0
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    """What is done before the process ends at once."""


_now = _Listening()


def install(*, at_edges: bool = False) -> None:
    """Hear the signals from now on. Only a process's main thread can: anywhere else nothing changes."""
    global _now
    if threading.current_thread() is not threading.main_thread():
        return
    _now = _Listening(at_edges=at_edges, pid=os.getpid())
    for number in SIGNALS:
        _now.before[number] = signal.signal(number, _hear)


def restore() -> None:
    """Put the handlers back that were there before `install`."""
    global _now
    before, _now = _now.before, _Listening()
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore() -> None:
    """Let the signals pass: for worker processes of data loading, and for a process whose work is done.

    Signals reach a whole process group, and the run itself ends its workers when it is ready.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def listening(wanted: bool | None) -> Iterator[None]:
    """Hear the signals within the block if `wanted` and no one does; raises ConfigError outside the main thread."""
    if not wanted or _now.before:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            what="enable_jit_checkpoint is on in a thread of its own",
            got=threading.current_thread().name,
            why="Python gives signals to the main thread alone",
            fix="call train() in the main thread, or set enable_jit_checkpoint=False",
        )
    install(at_edges=True)
    try:
        yield
    finally:
        restore()


def wait_for_edges() -> None:
    """From now on only note a signal: the run leaves where it can go on later."""
    _now.at_edges = True


def before_leaving(clean: Callable[[], None]) -> None:
    """Do this, too, when a signal ends the process at once."""
    _now.cleanups.append(clean)


def asked() -> str | None:
    """Return the name of the signal that asked this run to stop, None while none has."""
    return _now.asked


def reached(what: str, **again: object) -> None:
    """Note what a signal that comes from now on finds done, and the settings that go on from there."""
    _now.reached, _now.again = what, again


def check() -> None:
    """Leave, by raising Stopped, if a signal came."""
    if _now.asked is not None:
        raise Stopped(f"stopped by {_now.asked}: {_now.reached}", _now.again)


def _hear(number: int, _: Any) -> None:
    if os.getpid() != _now.pid:  # a forked worker: the run ends it
        return
    first = _now.asked is None
    _now.asked = _now.asked or signal.Signals(number).name
    if first and not _now.at_edges:
        _leave_at_once(_now.asked)


def _leave_at_once(name: str) -> None:
    """End the process here. An exception would do, but for imports, some of which swallow it and some die of it."""
    for clean in reversed(_now.cleanups):
        with contextlib.suppress(Exception):
            clean()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"whet: stopped by {name} before the first step: {_NOTHING_YET}\n".encode())
    os._exit(EXIT_STOPPED_AND_SAVED)
