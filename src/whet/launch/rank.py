"""Starts one rank and stays with it: `python -m whet.launch.rank FOLDER`, which torch's agent runs for each local rank.

This process binds itself to the rank's CPUs and memory, which the rank inherits, sets its variables, and checks that
what was preloaded is in its memory. FOLDER holds what the launcher decided (`Start`) and what the user asked (a byte
for each signal), and takes how each rank ended. torch's agent, which is the launcher's process, sends SIGTERM when
another rank failed. A signal of anyone else is the user's: Slurm and systemd signal every process of a job. The
launcher holds the other end of standard input: when that closes, because the launcher was killed, the rank is stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from whet import console, system
from whet.errors import EXIT_BAD_CONFIG, EXIT_IO, EXIT_OK, EXIT_STOPPED_AND_SAVED

STOP_S = 4.0
"""Seconds that a rank has to end by itself when another one failed or the launcher is gone."""
SAVE_S = 600.0
"""Seconds that ranks have to save a checkpoint after the user's signal, or after one of them has saved one."""
NOT_STARTED_AGAIN = (EXIT_STOPPED_AND_SAVED, EXIT_BAD_CONFIG)
"""Exit codes after which another start would end the same way, or is not wanted."""
ENDING = system.signals("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
"""Signals that ask the launcher to end."""
_RECEIVED = {*ENDING, *system.signals("SIGQUIT")}
"""Signals that a process around a rank waits for, in place of being ended by them."""
_SPEC, _ASKED = "start.json", "asked"
_PLACE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
"""Variables of a rank among others: a process alone, which may know nothing of ranks, gets none of them."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_LOADED_S = 5.0
_EVERY_S = 0.05
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RankStart:
    """What one rank of this host is started with."""

    cpus: Sequence[int]
    nodes: Sequence[int]
    variables: Mapping[str, str | None]
    """Those that differ from the launcher's own; None: left out."""


@dataclass(frozen=True)
class Start:
    """What the ranks of this host are started with."""

    command: Sequence[str]
    preload: Sequence[str]
    log_dir: str
    """Folder for the output of all ranks but rank 0."""
    launcher: int
    """Its process."""
    ranks: Sequence[RankStart]
    restarts: tuple[int, int] | None = None
    """How often all nodes were started before, and how often they may be; None: torch's agent restarts and counts."""

    def write(self, folder: Path) -> None:
        """Write it to the folder, where each rank's process reads it."""
        (folder / _SPEC).write_text(json.dumps(asdict(self)), "utf-8")
        (folder / _ASKED).write_bytes(b"")

    @classmethod
    def read(cls, folder: Path) -> Start:
        """Return what `write` has written."""
        found = json.loads((folder / _SPEC).read_text("utf-8"))
        return cls(**{**found, "ranks": [RankStart(**one) for one in found["ranks"]]})


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    rank: int
    code: int
    """Its exit code; 128 + the signal that killed it."""
    at: float
    by_itself: bool
    """Whether nobody had asked it to end."""
    log: str
    """The file with its output; "" if that was the launcher's own."""


def no_restart() -> int:
    """Return the signal that the launcher gets when the ranks are not to be started again; nobody else sends it."""
    return signal.SIGRTMIN + 5


def ask(folder: Path, number: signal.Signals) -> None:
    """Pass a signal of the user on to the ranks: the first asks them to end, a second one kills them."""
    with (folder / _ASKED).open("ab") as file:
        file.write(bytes([number]))


def endings(folder: Path, attempt: int) -> list[Ended]:
    """Return how the ranks of this host have ended so far, the first one first."""
    found = [Ended(**json.loads(path.read_text("utf-8"))) for path in folder.glob(f"ended-{attempt}-*.json")]
    return sorted(found, key=lambda one: one.at)


def blame(code: int, at: float, *, by_itself: bool) -> tuple[bool, bool, float]:
    """Return what orders failures: the least is the cause.

    Ranks that were asked to end come last. Of the others the killed come first: what lost them fails in the same moment
    with an error, or aborts.
    """
    return not by_itself, code <= 128 or code == 128 + signal.SIGABRT, at


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """Return the rank whose failure ended the others; None if none failed."""
    failed = [one for one in ended if one.code != EXIT_OK]
    return min(failed, key=lambda one: blame(one.code, one.at, by_itself=one.by_itself), default=None)


def say_failed(failed: Ended) -> None:
    """Say which rank failed, with the end of its output if that is in a file."""
    how = f"was killed by signal {failed.code - 128}" if failed.code > 128 else f"ended with exit code {failed.code}"
    say(f"rank {failed.rank} {how}; all ranks were stopped")
    if failed.log:
        say(f"the end of {failed.log}:")
        for line in tail(Path(failed.log)):
            print(f"  | {line}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line of the launcher's own, apart from what rank 0 prints."""
    for line in console.folded_message(text, console.width(), "    "):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def handled(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Have signals call these functions within the block; under nohup, SIGHUP asks for nothing."""
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    noted = {number: handler for number, handler in handlers.items() if number != signal.SIGHUP or not under_nohup}
    before: dict[int, Any] = {number: signal.signal(number, handler) for number, handler in noted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tail(log: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a rank's log."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []


def main(folder: Path, environment: Mapping[str, str] = os.environ) -> int:
    """Run the rank; return its exit code, 128 + the signal that killed it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _RECEIVED)  # only so is their sender known
    start = Start.read(folder)
    watch = _Watch(folder, start.launcher)
    rank, local_rank, attempt = (
        int(environment[name]) for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    log = Path(start.log_dir) / f"rank-{rank}.log" if rank else None
    if attempt and local_rank == 0:
        _say_restart(folder, attempt, environment["TORCHELASTIC_MAX_RESTARTS"])
    n_restarts = attempt
    if start.restarts is not None:
        n_restarts, most = start.restarts
        environment = {
            **environment, "TORCHELASTIC_RESTART_COUNT": str(n_restarts), "TORCHELASTIC_MAX_RESTARTS": str(most)
        }  # fmt: skip
    try:
        _send_output_to(log, n_restarts)
    except OSError as error:
        print(f"whet launch: the log of rank {rank} cannot be written: {error}", file=sys.stderr)
        return _end(start, folder, Ended(rank, EXIT_IO, time.time(), True, ""), attempt, watch)
    bind(start.ranks[local_rank])
    code = _run(start, start.ranks[local_rank], watch, environment)
    ended = Ended(rank, code, time.time(), not watch.asked, str(log.absolute()) if log else "")
    return _end(start, folder, ended, attempt, watch)


def bind(own: RankStart) -> None:
    """Bind this process, and what it starts, to the CPUs of a rank and, if possible, to the memory of its node."""
    if own.cpus:
        system.bind(own.cpus)
    prefer_memory_of(own.nodes)


def prefer_memory_of(nodes: Sequence[int]) -> bool:
    """Have the memory of this process and its children come from one NUMA node; return whether the kernel allows it."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if len(nodes) != 1 or call is None:
        return False
    mask = (ctypes.c_ulong * (nodes[0] // 64 + 1))()
    mask[nodes[0] // 64] = 1 << nodes[0] % 64
    return ctypes.CDLL(None).syscall(call, _MPOL_PREFERRED, mask, 64 * len(mask) + 1) == 0


class _Watch:
    """Who asked the rank to end, until when it has time, and the signals that are due."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self._file, self._launcher = folder / _ASKED, launcher
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._awaited = _RECEIVED - {signal.SIGHUP} if under_nohup else _RECEIVED
        self._came: signal.Signals | None = None
        self._stops = self._is_stopped = self._is_passed_on = False
        self._asks = b""
        self._n_asked = 0
        self._kill_at = float("inf")
        self._launcher_is_there = True
        self.asked = False
        """Whether anybody has asked the rank to end."""

    def due(self) -> Iterator[signal.Signals]:
        """Wait a moment, and yield the signals that the rank is to get now."""
        for number in self.by_user():
            yield number
            self._give(SAVE_S)
        if self.stopped and not self._is_stopped:
            self._is_stopped = True
            yield from self._stop()
        if not self._launcher_is_there:
            time.sleep(_EVERY_S)
        elif select.select([0], [], [], _EVERY_S)[0] and not os.read(0, 1 << 10):
            self._launcher_is_there = False
            yield from self._stop()
        if time.monotonic() > self._kill_at:
            yield signal.SIGKILL

    def by_user(self) -> Iterator[signal.Signals]:
        """Yield what the user's signals mean for the rank: those that the launcher wrote down, and one that came here.

        That one and the first of the launcher's are one request, of somebody who signals every process.
        """
        self._receive()
        with suppress(OSError):  # the launcher is gone, and its folder
            self._asks = self._file.read_bytes()
        first = signal.Signals(self._asks[0]) if self._asks else self._came
        if first is not None and not self._is_passed_on:
            self.asked = self._is_passed_on = True
            yield first
        for _ in self._asks[max(self._n_asked, 1) :]:
            yield signal.SIGKILL
        self._n_asked = len(self._asks)

    @property
    def stopped(self) -> bool:
        """Whether torch's agent has stopped the rank, because another one failed."""
        self._receive()
        return self._stops

    def _receive(self) -> None:
        while (found := signal.sigtimedwait(self._awaited, 0)) is not None:
            if found.si_pid == self._launcher:
                self._stops = True
            else:
                self._came = self._came or signal.Signals(found.si_signo)

    def _stop(self) -> Iterator[signal.Signals]:
        if not self.asked:
            yield signal.SIGTERM
        self.asked = True
        self._give(STOP_S)

    def _give(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)


def _run(start: Start, own: RankStart, watch: _Watch, environment: Mapping[str, str]) -> int:
    """Run the command to its end; return its exit code."""
    if number := next(watch.by_user(), None):
        return 128 + number
    try:
        rank = _started(start.command, _environment(own, environment))
    except OSError as error:
        print(f"whet launch: {start.command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        if missing := _missing_libraries(rank, start.preload):
            return missing
        while (code := rank.poll()) is None:
            for number in watch.due():
                _signal(rank, number)
        return code if code >= 0 else 128 - code
    finally:
        _signal(rank, signal.SIGKILL)  # what the rank has started and left behind


def _environment(own: RankStart, environment: Mapping[str, str]) -> dict[str, str]:
    found = {**environment, **own.variables}
    left_out = _PLACE if environment["WORLD_SIZE"] == "1" else ()
    return {name: value for name, value in found.items() if value is not None and name not in left_out}


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the rank in a session of its own, so that a signal to the group reaches all that it starts."""
    ends_with_this = system.ending_with(os.getpid())

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RECEIVED)
        if not ends_with_this():  # if this process is killed, nobody else would stop the rank
            os._exit(1)

    return subprocess.Popen(  # noqa: S603 (the command of the user)
        command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, preexec_fn=before_exec
    )


def _missing_libraries(rank: subprocess.Popen[bytes], paths: Sequence[str]) -> int:
    """Return 0 once every library is in the rank's memory; the linker ignores one that it cannot load."""
    wanted, until = {os.path.realpath(path) for path in paths}, time.monotonic() + _LOADED_S
    while wanted and rank.poll() is None:
        with suppress(OSError):
            lines = Path(f"/proc/{rank.pid}/maps").read_text("utf-8", "replace").splitlines()
            wanted -= {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if line.count(" /")}
        if wanted and time.monotonic() > until:
            print(f"whet launch: not loaded, though preloaded: {', '.join(sorted(wanted))}", file=sys.stderr)
            return EXIT_BAD_CONFIG
        if wanted:
            time.sleep(_EVERY_S)
    return 0


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the rank and to all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)


def _send_output_to(log: Path | None, n_restarts: int) -> None:
    """Have this process and the rank print to a file; the log of an attempt that failed is kept, and added to."""
    if log is None:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab" if n_restarts else "wb", buffering=0) as file:
        if n_restarts:
            file.write(f"--- whet launch: restart {n_restarts} ---\n".encode())
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _say_restart(folder: Path, attempt: int, most: str) -> None:
    """Say why the ranks are started again."""
    failed = first_failure(endings(folder, attempt - 1))
    if failed is not None:
        say_failed(failed)
    say(f"restart {attempt} of {most}")


def _end(start: Start, folder: Path, ended: Ended, attempt: int, watch: _Watch) -> int:
    """Write down how the rank ended, and return its exit code: torch's agent then stops the others, if it is not 0.

    A rank that has saved and stopped leaves the others the time to do so too: it ends with the last of this host.
    """
    path = folder / f"ended-{attempt}-{ended.rank}.json"
    with suppress(OSError):  # the launcher is gone, and its folder
        path.with_suffix(".part").write_text(json.dumps(asdict(ended)), "utf-8")
        path.with_suffix(".part").replace(path)
    if ended.code == EXIT_STOPPED_AND_SAVED:
        until = time.monotonic() + SAVE_S
        while not watch.stopped and len(endings(folder, attempt)) < len(start.ranks) and time.monotonic() < until:
            if os.getppid() != start.launcher:
                break
            time.sleep(_EVERY_S)
    by_user = not ended.by_itself and ended.code != EXIT_OK
    if os.getppid() != start.launcher:
        shutil.rmtree(folder, ignore_errors=True)
    elif not watch.stopped and (ended.code in NOT_STARTED_AGAIN or by_user):
        os.kill(start.launcher, no_restart())
    return ended.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
