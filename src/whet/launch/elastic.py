"""Runs the ranks of this host under torch's elastic agent, which starts, watches and restarts them as torchrun does."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from whet.errors import EXIT_OK, ConfigError, OutputError
from whet.launch import rank
from whet.launch.rank import NO_RESTART, Ended, RankStart, Start
from whet.launch.words import without_secrets

_SAME_S = 1.0
"""Signals within this time of the first are one request: a terminal that closes sends SIGHUP twice."""
_WATCHES_S = 0.05
_ENDS_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOPBACK = "127.0.0.1"


@dataclass
class Outcome:
    """How the ranks of this host ended."""

    code: int
    """That of the first rank that failed, 0 if none did."""
    failed: Ended | None = None
    stopped_by: signal.Signals | None = None
    """The signal that asked the launcher to stop."""


def run(
    command: Sequence[str],
    ranks: Sequence[RankStart],
    *,
    preload: Sequence[Path],
    log_dir: Path,
    port: int | None,
    max_restarts: int,
) -> Outcome:
    """Start the ranks of this machine and wait until all have ended.

    When one fails, the others get SIGTERM at once and SIGKILL 4 seconds later. A signal to this process is passed on to
    all ranks, which may then save; a second one kills them. They meet at `port` of the loopback interface.
    """
    words, held = without_secrets(command)
    _require_writable(log_dir)
    with _listening(port) as listener, tempfile.TemporaryDirectory(prefix="whet-launch-") as name:
        folder = Path(name)
        own = Start(words, [str(path) for path in preload], str(log_dir.absolute()), os.getpid(), ranks)
        own.write(folder)
        os.environ.update(held)
        with _signals(folder) as asked, _input_held():
            failures = _run_agent(folder, len(ranks), listener, max_restarts, asked)
        return _outcome(folder, max_restarts, failures, asked.by_user)


@dataclass
class _Asked:
    """What signals to this process have asked for."""

    by_user: list[signal.Signals] = field(default_factory=list)
    no_restart: bool = False
    interrupts: Callable[[], None] | None = None
    """Ends torch's agent, once it runs, together with the ranks."""


def _run_agent(
    folder: Path, n_ranks: int, listener: socket.socket, max_restarts: int, asked: _Asked
) -> dict[int, int] | None:
    """Return rank -> exit code of those that failed in the last attempt, as torch's agent saw them.

    None: the ranks were asked to end, or are not to be started again.
    """
    import torch.distributed as torch_dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    def interrupt() -> None:
        raise SignalException("the ranks are not to be started again", signal.SIGTERM)

    _quieten()
    port = int(listener.getsockname()[1])
    # the agent's own store of the same port shares this server, which listens on the loopback interface alone
    store = torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        _LOOPBACK, port, None, True, timedelta(seconds=60), wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=n_ranks, run_id=secrets.token_hex(8), role="rank",
        rdzv_backend="static", rdzv_endpoint=f"{_LOOPBACK}:{port}", rdzv_configs={"rank": 0},
        max_restarts=max_restarts, monitor_interval=_WATCHES_S, logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="SIGQUIT",  # those of `_signals` stay as they are
    )  # fmt: skip
    try:
        asked.interrupts = interrupt
        if not asked.by_user:
            launch_agent(config, sys.executable, ["-m", "whet.launch.rank", str(folder)])
            return {}
    except SignalException:
        return None
    except ChildFailedError as error:
        return {number: failure.exitcode for number, failure in error.failures.items()}
    finally:
        asked.interrupts = None
        del store
    return None


def _outcome(
    folder: Path, max_restarts: int, failures: dict[int, int] | None, by_user: Sequence[signal.Signals]
) -> Outcome:
    stopped_by = by_user[0] if by_user else None
    if failures == {}:
        return Outcome(EXIT_OK, None, stopped_by)
    last = next((found for n in range(max_restarts, -1, -1) if (found := rank.endings(folder, n))), [])
    failed = rank.first_failure(last)
    killed = [(number, code) for number, code in (failures or {}).items() if number not in {one.rank for one in last}]
    if killed and (failed is None or not failed.by_itself):  # the process that starts the rank was killed itself
        number, code = killed[0]
        failed = Ended(number, code if code >= 0 else 128 - code, time.time(), True, "")
    code = EXIT_OK if failed is None else failed.code
    if stopped_by is not None and not last:
        code = 128 + stopped_by
    return Outcome(code, failed, stopped_by)


@contextmanager
def _signals(folder: Path) -> Iterator[_Asked]:
    """Pass the signals that ask this process to end on to the ranks, instead of ending it, within the block.

    Signals that follow the first at once are not passed on, and under nohup, SIGHUP asks for nothing.
    """
    asked, first_s = _Asked(), 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if not asked.by_user or now_s - first_s >= _SAME_S:
            asked.by_user.append(signal.Signals(number))
            rank.ask(folder, signal.Signals(number))
        first_s = first_s or now_s

    def end(_: int, __: FrameType | None) -> None:
        if not asked.no_restart and asked.interrupts is not None:
            asked.no_restart = True
            asked.interrupts()

    noted = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, note) for number in noted}
    before[NO_RESTART] = signal.signal(NO_RESTART, end)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _input_held() -> Iterator[None]:
    """Give all that is started within the block a standard input that closes when this process ends.

    At the end of the block it is closed, and what was started is waited for.
    """
    before = os.dup(0)
    reader, writer = os.pipe()
    os.dup2(reader, 0)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        until = time.monotonic() + _ENDS_S
        with suppress(ChildProcessError):
            while time.monotonic() < until:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(_WATCHES_S)
        os.dup2(before, 0)
        os.close(before)


@contextmanager
def _listening(port: int | None) -> Iterator[socket.socket]:
    """Listen on the loopback interface: at a free port if none is given."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK, port or 0))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                what="the master port is not free",
                got=f"port {port}: {error.strerror}",
                why="the ranks find each other there",
                fix=f"end the program that uses it (ss -ltnp 'sport = :{port}'), or leave --master_port out: "
                "a free port is then chosen",
            ) from error
        yield listener


def _require_writable(log_dir: Path) -> None:
    """Raise OutputError, before any rank runs, if the ranks' logs cannot be written."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=log_dir).close()
    except OSError as error:
        raise OutputError(
            what="the logs of the ranks cannot be written",
            got=str(error),
            why="rank 0 prints to the terminal, and each other rank to a file of its own",
            fix="name a folder that this user can write in --log_dir",
        ) from error


def _quieten() -> None:
    """Leave what torch's agent logs out, unless LOGLEVEL asks for it: the launcher says how ranks ended."""
    if "LOGLEVEL" not in os.environ:
        theirs = logging.getLogger("torch.distributed.elastic")
        theirs.addHandler(logging.NullHandler())
        theirs.propagate = False
