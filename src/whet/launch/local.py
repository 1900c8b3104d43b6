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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from whet.errors import EXIT_OK, EXIT_STOPPED_AND_SAVED, OutputError
from whet.launch.child import STOP_S, WORDS
from whet.launch.words import without_secrets

_EVERY_S = 0.05
_SAME_S = 1.0
"""Signals within this time of the first are one request: a terminal that closes sends SIGHUP twice."""
_TAIL_BYTES = 1 << 16
SAVE_S = 600.0
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
    restart: int = 0
    """How often the ranks were started before: the log of the attempt that failed is then kept, and added to."""

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
class Ending:
    """Why and until when the ranks are being stopped. Another thread may set `stop`, and add to `asked`."""

    asked: list[signal.Signals] = field(default_factory=list)
    """The signals that the ranks get, in order: the first asks them to end, a second one kills them."""
    noted: list[signal.Signals] | None = None
    """Where signals to this process are noted, for another thread to pass on; None: they go to `asked`."""
    stop: bool = False
    """A rank on another host failed, or the launcher is gone."""
    kill_at: float = float("inf")
    first: Running | None = None
    """The first rank that failed by itself."""


def run(
    starts: Sequence[RankStart],
    ending: Ending | None = None,
    on_failure: Callable[[RankStart, int], None] = lambda rank, code: None,
) -> Outcome:
    """Start the ranks and wait until all have ended; `on_failure` gets the first that fails, as soon as it does.

    When one fails, the others get SIGTERM at once and SIGKILL 4 seconds later. A signal to this process is passed on to
    all ranks, which may then save; a second one kills them.
    """
    ending = ending or Ending()
    for one in starts:
        _make_log(one)
    with signals_noted(ending.asked if ending.noted is None else ending.noted):
        ranks = [_started(one) for one in starts]
        try:
            _wait(ranks, ending, on_failure)
        finally:
            _kill(ranks)
    failed = ending.first
    code = EXIT_OK if failed is None or failed.code is None else failed.code
    return Outcome(code, failed and failed.start, ending.asked[0] if ending.asked else None)


def tail(log: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a rank's log."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []


def _make_log(start: RankStart) -> None:
    """Create the rank's log, or begin a new part of it; raises OutputError, before any rank runs, if that fails."""
    if start.log is None:
        return
    try:
        start.log.parent.mkdir(parents=True, exist_ok=True)
        with start.log.open("ab" if start.restart else "wb") as file:
            if start.restart:
                file.write(f"--- whet launch: restart {start.restart} ---\n".encode())
    except OSError as error:
        raise OutputError(
            what=f"the log of rank {start.rank} cannot be written",
            got=str(error),
            why="rank 0 prints to the terminal, and each other rank to a file of its own",
            fix="name a folder that this user can write in --log_dir",
        ) from error


def _started(start: RankStart) -> Running:
    output: IO[bytes] | None = None if start.log is None else start.log.open("ab")
    words, held = without_secrets(start.command)
    specification = replace(start, command=words).specification()
    command = [sys.executable, "-m", "whet.launch.child", specification]
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command, stdin=subprocess.PIPE, stdout=output, stderr=output and subprocess.STDOUT,
            env={**start.environment, **held}, start_new_session=True,
        )  # fmt: skip
    finally:
        if output is not None:
            output.close()
    return Running(start, process)


def _wait(ranks: Sequence[Running], ending: Ending, on_failure: Callable[[RankStart, int], None]) -> None:
    """Return when every rank has ended."""
    n_passed_on, stopping = 0, False
    while any(rank.code is None for rank in ranks):
        for number in ending.asked[n_passed_on:]:
            n_passed_on += 1
            _tell(ranks, _WORD_OF[number] if n_passed_on == 1 else _WORD_OF[signal.SIGKILL])
            ending.kill_at = min(ending.kill_at, time.monotonic() + SAVE_S)
        if ending.stop and not stopping:
            stopping = True
            _stop(ranks, ending)
        for rank in ranks:
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code = code if code >= 0 else 128 - code
                if _is_first_failure(rank, ending):
                    _let_the_others_end(rank.code, ranks, ending)
                    on_failure(rank.start, rank.code)
        if time.monotonic() > ending.kill_at:
            _tell(ranks, _WORD_OF[signal.SIGKILL])
        time.sleep(_EVERY_S)


def _is_first_failure(rank: Running, ending: Ending) -> bool:
    """Return whether this rank failed before any other did; a rank that was stopped has not failed."""
    if rank.code == EXIT_OK or ending.first is not None or ending.stop:
        return False
    ending.first = rank
    return True


def _let_the_others_end(code: int, ranks: Sequence[Running], ending: Ending) -> None:
    """Stop the other ranks; if one saved and stopped, they have the time to do so too."""
    if code == EXIT_STOPPED_AND_SAVED:
        ending.kill_at = min(ending.kill_at, time.monotonic() + SAVE_S)
    else:
        _stop(ranks, ending, say=not ending.asked)


def _stop(ranks: Sequence[Running], ending: Ending, *, say: bool = True) -> None:
    ending.kill_at = min(ending.kill_at, time.monotonic() + STOP_S)
    if say:
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
def signals_noted(into: list[signal.Signals]) -> Iterator[None]:
    """Add the signals that ask this process to end to a list, instead of ending it, within the block.

    Signals that follow the first at once are not added, and under nohup, SIGHUP asks for nothing.
    """
    first_s: float | None = None

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if first_s is None or now_s - first_s >= _SAME_S:
            into.append(signal.Signals(number))
        first_s = now_s if first_s is None else first_s

    noted = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Callable[..., Any] | int | None] = {number: signal.signal(number, note) for number in noted}
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
