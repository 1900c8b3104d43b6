"""The ranks of one host: started together, watched, and stopped together as soon as one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from whet.errors import EXIT_OK, EXIT_STOPPED_AND_SAVED
from whet.launch.child import STOP_S, WORDS

_EVERY_S = 0.05
_SAVE_S = 600.0
"""Seconds that ranks have to save a checkpoint after the user's signal, or after one of them has saved one."""
_WORD_OF = {number: word for word, number in WORDS.items()}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class RankStart:
    """What one rank is started with."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    cpus: Sequence[int]
    nodes: Sequence[int]
    preload: Sequence[str]
    log: Path | None
    """The file that its output goes to; None: this process's own output."""

    def specification(self) -> str:
        """Return the argument of `whet.launch.child`."""
        facts = {"command": self.command, "cpus": self.cpus, "nodes": self.nodes, "preload": self.preload}
        return json.dumps(facts)


@dataclass
class Running:
    """A rank that runs, or has ended."""

    start: RankStart
    process: subprocess.Popen[bytes]
    code: int | None = None
    """Its exit code, None while it runs."""

    def tell(self, word: bytes) -> None:
        """Have the rank get a signal."""
        if self.process.stdin is not None:
            with suppress(OSError, ValueError):
                self.process.stdin.write(word)
                self.process.stdin.flush()


@dataclass
class Outcome:
    """How the ranks ended."""

    code: int
    """That of the first rank that failed, 0 if none did."""
    failed: RankStart | None = None
    stopped_by: signal.Signals | None = None
    """The signal that asked the launcher to stop."""


@dataclass
class _Ending:
    """Why and until when the ranks are being stopped."""

    kill_at: float = float("inf")
    first: Running | None = None
    asked: list[signal.Signals] = field(default_factory=list)


def run(starts: Sequence[RankStart]) -> Outcome:
    """Start the ranks and wait until all have ended.

    When one fails, the others get SIGTERM at once and SIGKILL 4 seconds later. A signal to this process is passed on to
    all ranks, which may then save; a second one kills them.
    """
    ending = _Ending()
    with _passed_on(ending):
        ranks = [_started(one) for one in starts]
        try:
            _wait(ranks, ending)
        finally:
            _kill(ranks)
    failed = ending.first
    code = EXIT_OK if failed is None or failed.code is None else failed.code
    return Outcome(code, failed and failed.start, ending.asked[0] if ending.asked else None)


def tail(log: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a rank's log."""
    try:
        return log.read_text("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []


def _started(start: RankStart) -> Running:
    output: IO[bytes] | None = None
    if start.log is not None:
        start.log.parent.mkdir(parents=True, exist_ok=True)
        output = start.log.open("wb")
    command = [sys.executable, "-m", "whet.launch.child", start.specification()]
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command, stdin=subprocess.PIPE, stdout=output, stderr=output and subprocess.STDOUT,
            env=dict(start.environment), start_new_session=True,
        )  # fmt: skip
    finally:
        if output is not None:
            output.close()
    return Running(start, process)


def _wait(ranks: Sequence[Running], ending: _Ending) -> None:
    """Return when every rank has ended."""
    n_told = 0
    while any(rank.code is None for rank in ranks):
        for number in ending.asked[n_told:]:
            n_told += 1
            word = _WORD_OF[number] if n_told == 1 else _WORD_OF[signal.SIGKILL]
            _tell(ranks, word)
            ending.kill_at = min(ending.kill_at, time.monotonic() + _SAVE_S)
        for rank in ranks:
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code = code if code >= 0 else 128 - code
                _ended(rank, ranks, ending)
        if time.monotonic() > ending.kill_at:
            _tell(ranks, _WORD_OF[signal.SIGKILL])
        time.sleep(_EVERY_S)


def _ended(rank: Running, ranks: Sequence[Running], ending: _Ending) -> None:
    """Stop the other ranks if this one failed; one that saved and stopped leaves them the time to do so too."""
    if rank.code == EXIT_OK or ending.first is not None:
        return
    ending.first = rank
    saves = rank.code == EXIT_STOPPED_AND_SAVED
    ending.kill_at = min(ending.kill_at, time.monotonic() + (_SAVE_S if saves else STOP_S))
    if not saves and not ending.asked:
        _tell(ranks, _WORD_OF[signal.SIGTERM])


def _tell(ranks: Sequence[Running], word: bytes) -> None:
    for rank in ranks:
        if rank.code is None:
            rank.tell(word)


def _kill(ranks: Sequence[Running]) -> None:
    """End what still runs: a closed standard input stops a rank, and its process is waited for."""
    _tell(ranks, _WORD_OF[signal.SIGKILL])
    for rank in ranks:
        if rank.process.stdin is not None:
            with suppress(OSError):
                rank.process.stdin.close()
        rank.process.wait()


@contextmanager
def _passed_on(ending: _Ending) -> Iterator[None]:
    """Note signals to this process within the block; they are passed on to the ranks."""

    def note(number: int, _: FrameType | None) -> None:
        ending.asked.append(signal.Signals(number))

    before: dict[int, Callable[..., Any] | int | None] = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def host_name() -> str:
    """Return this machine's own name."""
    return os.uname().nodename
