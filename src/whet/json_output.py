"""`--json`: the one JSON object that a command prints, as the last line of standard output.

The work adds to the object what it reaches (`add`, `append`, `add_outputs`); the command line begins it, and prints it
once it knows how the command ended. Meanwhile all other text goes to standard error: what Python prints, and in a
process of the command line also what C libraries and other processes print, because descriptor 1 leads there. Of
several ranks the first one prints. A killed process prints nothing.

Without `--json` every function here does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import EXIT_STOPPED_AND_SAVED, Problem, escape_controls, hide_secrets
from whet.log import logger
from whet.strict_json import with_finite_numbers
from whet.version import __version__


@dataclass
class _Object:
    """The object of the command that runs, until it is printed."""

    command: str
    is_first: Callable[[], bool]
    stream: Any
    """Standard output as it was."""
    descriptor: int | None
    """Where descriptor 1 led; None if this process is not the command line's alone."""
    began_s: float = field(default_factory=time.perf_counter)
    pid: int = field(default_factory=os.getpid)
    facts: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Path] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    """What was there under the names of outputs that the command may write."""
    warnings: list[str] = field(default_factory=list)
    resuming: Callable[[Mapping[str, object]], str] | None = None
    """Settings -> the command line that resumes with them."""
    is_stopped: bool = False
    printing: threading.Lock = field(default_factory=threading.Lock)
    """Taken once, by whoever prints the object: the command, or the thread that ends it after a signal."""

    def text(self, code: int) -> str:
        return json.dumps(with_finite_numbers(self.values(code)), allow_nan=False)

    def values(self, code: int) -> dict[str, Any]:
        is_stopped = self.is_stopped or code == EXIT_STOPPED_AND_SAVED
        status = "error" if "error" in self.facts else "stopped" if is_stopped else "failed" if code else "ok"
        general = {
            "command": self.command, "status": status, "exit_code": code, "version": __version__,
            "seconds": round(time.perf_counter() - self.began_s, 3), "metrics": {},
            "outputs": {
                name: str(path)
                for name, path in self.outputs.items()
                if path.exists() and (name not in self.before or _version_of(path) != self.before[name])
            },
            "warnings": list(dict.fromkeys(self.warnings)),
        }  # fmt: skip
        return general | self.facts


_current: _Object | None = None


@contextlib.contextmanager
def begun(command: str, is_first: Callable[[], bool], *, own_process: bool) -> Iterator[None]:
    """Collect the object of this command within the block, and send all other text to standard error.

    `is_first`: whether this process prints it. `own_process`: the process is the command line's alone.
    """
    global _current
    before, stream = _current, sys.stdout
    found = _current = _Object(command, is_first, stream, _led_to_error(stream) if own_process else None)

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            found.warnings.append(hide_secrets(escape_controls(record.getMessage())))
        return True

    logger.addFilter(keep)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.removeFilter(keep)
        _current = before


def _led_to_error(stream: Any) -> int:
    """Have descriptor 1 lead where descriptor 2 does; return a descriptor that leads where it did."""
    stream.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def is_wanted() -> bool:
    """Return whether this command prints an object: text with the same content need not be printed."""
    return _current is not None


def add(**facts: Any) -> None:
    """Put these facts into the object."""
    if _current is not None:
        _current.facts |= facts


def append(name: str, value: Any) -> None:
    """Add a value to a list of the object."""
    if _current is not None:
        _current.facts.setdefault(name, []).append(value)


def add_outputs(**paths: str | Path) -> None:
    """Name files or folders that the command has written; the object has those that exist, as absolute paths."""
    if _current is not None:
        _current.outputs |= {name: Path(path).absolute() for name, path in paths.items()}


def may_write(**paths: str | Path) -> None:
    """Name files that the command may write; the object has those that it has written, not those of an earlier one."""
    add_outputs(**paths)
    if _current is not None:
        _current.before |= {name: _version_of(_current.outputs[name]) for name in paths}


def _version_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes when the file is replaced or appended to; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def warn(text: str) -> None:
    """Add a warning that was not logged."""
    if _current is not None:
        _current.warnings.append(hide_secrets(escape_controls(text)))


def resumes_by(resuming: Callable[[Mapping[str, object]], str]) -> None:
    """Have the object of a command that is stopped say how to resume: settings -> the command line with them."""
    if _current is not None:
        _current.resuming = resuming


def fail(problems: Sequence[Problem], again: Mapping[str, object]) -> None:
    """Say what is wrong, and how to resume once it is fixed, if there is something to resume."""
    if _current is None:
        return
    parts = [one.parts() for one in problems]
    _current.facts |= {"error": parts[0]} | ({"errors": parts} if len(parts) > 1 else {})
    if again:
        _say_how_to_resume(_current, again)


def fail_unexpectedly(error: BaseException) -> None:
    """Say that an exception ends the command which no user has caused."""
    fault = Problem(
        what=f"the command ended with an unexpected {type(error).__name__}",
        got=str(error),
        why="whet, or a library that it calls, has a fault; standard error has the traceback",
        fix="report it with the traceback and the output of whet doctor",
    )
    fail([fault], {})


def stop(text: str, again: Mapping[str, object] | None = None) -> None:
    """Say that a signal ended the command, and, unless None, with which settings it resumes."""
    if _current is None:
        return
    _current.is_stopped = True
    _current.facts["stopped"] = hide_secrets(escape_controls(text))
    if again is not None:
        _say_how_to_resume(_current, again)


def _say_how_to_resume(found: _Object, again: Mapping[str, object]) -> None:
    if found.resuming is not None:
        found.facts["resume"] = found.resuming(again)


def finish(code: int) -> None:
    """Print the object of a command that ends with this exit code, once; raises OSError if nobody can read it."""
    found = _current
    if found is None or not _prints(found):
        return
    if found.descriptor is not None:
        sys.stderr.flush()
        os.dup2(found.descriptor, 1)
    found.stream.write(f"{found.text(code)}\n")
    found.stream.flush()


def finish_at_once(code: int, text: str, again: Mapping[str, object] | None = None) -> None:
    """Print the object from any thread of a process that a signal ends now: no stream is used, no lock awaited."""
    found = _current
    if found is None or found.descriptor is None or not _prints(found):
        return
    with contextlib.suppress(Exception):  # of the command that resumes: the exit must not wait for it
        stop(text, again)
    with contextlib.suppress(OSError):
        os.write(found.descriptor, f"{found.text(code)}\n".encode())


def hand_over() -> None:
    """Let descriptor 1 lead again where it did: this process becomes a program that prints an object itself."""
    if _current is not None and _current.descriptor is not None:
        os.dup2(_current.descriptor, 1)


def _prints(found: _Object) -> bool:
    return os.getpid() == found.pid and found.is_first() and found.printing.acquire(blocking=False)
