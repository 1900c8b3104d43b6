"""Runs the ranks of this host under torch's elastic agent, which starts, watches and restarts them as torchrun does."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from whet import system
from whet.errors import EXIT_IO, EXIT_OK, ConfigError, OutputError, WhetError
from whet.hardware import network
from whet.launch import rank
from whet.launch.rank import Ended, Start
from whet.launch.words import without_secrets

_SAME_S = 1.0
"""Signals within this time of the first are one request: a terminal that closes sends SIGHUP twice."""
_WATCHES_S = 0.05
_ENDS_S, _STORE_S = 10.0, 60.0
_CONNECTS_S, _TRIES_EVERY_S = 5.0, 0.2
_SAYS_AFTER_S, _SAYS_EVERY_S = 1.0, 10.0
_LOOPBACK = "127.0.0.1"


@dataclass
class Outcome:
    """How the ranks of this host ended."""

    code: int
    """That of the first rank that failed, 0 if none did."""
    failed: Ended | None = None
    stopped_by: signal.Signals | None = None
    """The signal that asked the launcher to stop."""


@dataclass(frozen=True)
class Meeting:
    """Where the launchers of all nodes meet, and their ranks; of one machine alone, at its loopback interface."""

    host: str = _LOOPBACK
    port: int | None = None
    """None: a free one, of one machine alone."""
    n_nodes: int = 1
    node_rank: int = 0
    within_s: float = 60.0
    """How long the launchers wait for each other."""


def run(start: Start, *, max_restarts: int, meeting: Meeting) -> Outcome:
    """Start the ranks of this machine and wait until all have ended.

    When one fails, the others here get SIGTERM at once and SIGKILL 4 seconds later. A signal of `rank.ENDING` to this
    process is passed on to all ranks here, which may then save; a second one kills them.
    """
    words, held = without_secrets(start.command)
    several = len(start.ranks) > 1 or meeting.n_nodes > 1
    with (
        _logs(Path(start.log_dir), meeting.node_rank if several else None),
        listens(meeting) as listener,
        tempfile.TemporaryDirectory(prefix="whet-launch-") as name,
    ):
        folder = Path(name)
        replace(start, command=words).write(folder)
        os.environ.update(held)
        with _signals(folder) as asked, _input_held():
            failures = _run_agent(folder, len(start.ranks), listener, max_restarts, meeting, asked)
        return _outcome(folder, max_restarts, failures, asked.by_user)


@dataclass
class _Asked:
    """What signals to this process have asked for."""

    by_user: list[signal.Signals] = field(default_factory=list)
    no_restart: bool = False

    @property
    def to_end(self) -> bool:
        """Whether the ranks are to end, and not to be started."""
        return self.no_restart or bool(self.by_user)

    interrupts: Callable[[], None] | None = None
    """Ends torch's agent, once it runs, together with the ranks."""


def _run_agent(
    folder: Path, n_ranks: int, listener: socket.socket | None, max_restarts: int, meeting: Meeting, asked: _Asked
) -> dict[int, int] | None:
    """Return rank -> exit code of those that failed in the last attempt, as torch's agent saw them.

    None: the ranks were asked to end, or are not to be started again.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    def interrupt() -> None:
        raise SignalException("the ranks are not to be started again", signal.SIGTERM)

    _quieten()
    port = meeting.port if listener is None else int(listener.getsockname()[1])
    assert port is not None
    if listener is None and not _answers(meeting, port, asked):
        return None
    try:
        store = _store(meeting.host, port, listener)
        if not _all_came(store, meeting, port, asked):
            return None
    except RuntimeError as error:
        if asked.to_end:  # node 0 was asked, too, and has ended before this one
            return None
        raise _lost(meeting, port, error) from error
    rounds = _rounds(store, meeting, port)
    rendezvous_handler_registry.register("whet", lambda _: rounds)
    config = LaunchConfig(
        min_nodes=meeting.n_nodes, max_nodes=meeting.n_nodes, nproc_per_node=n_ranks, run_id="whet", role="rank",
        rdzv_backend="whet", max_restarts=max_restarts, monitor_interval=_WATCHES_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="SIGQUIT",  # those of `_signals` stay as they are
    )  # fmt: skip
    try:
        asked.interrupts = interrupt
        if not asked.to_end:
            program, *words = system.python("-m", "whet.launch.rank", str(folder))
            launch_agent(config, program, words)
            return {}
    except SignalException:
        return None
    except ChildFailedError as error:
        return {number: failure.exitcode for number, failure in error.failures.items()}
    except RuntimeError as error:
        if asked.to_end:
            return None
        raise _lost(meeting, port, error) from error
    finally:
        asked.interrupts = None
    return None


class LostNodeError(WhetError):
    """The launcher of another node is gone, or does not answer."""

    exit_code = EXIT_IO


def _lost(meeting: Meeting, port: int, error: RuntimeError) -> LostNodeError:
    return LostNodeError(
        what=f"node {meeting.node_rank} of {meeting.n_nodes} lost the launcher of node 0",
        got=f"{meeting.host} port {port}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        why="the launchers of all nodes meet at node 0, as long as their ranks run",
        fix="read the messages of the launcher there for the cause, then start all launchers again",
    )


def _store(host: str, port: int, listener: socket.socket | None) -> Any:
    """Return a store of torch's, which this process serves at the listener, or which it connects to."""
    import torch.distributed as torch_dist

    more: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return torch_dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, None, listener is not None, timedelta(seconds=_STORE_S), wait_for_workers=False, **more
    )


def _rounds(store: Any, meeting: Meeting, port: int) -> Any:
    """Return torch's rendezvous of these nodes: their numbers stay, and no message of it is a pickle.

    Its `c10d` reads pickles from the store and numbers nodes by their addresses. Its `static` gives ranks that are
    started again the store of those that failed, in which their addresses still are: here each restart has a new store.
    """
    import torch.distributed as torch_dist
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Rounds(RendezvousHandler):
        def __init__(self) -> None:
            self._n_rounds, self._server = 0, store

        def next_rendezvous(self) -> RendezvousInfo:
            number, key = self._n_rounds, f"whet/port/{self._n_rounds}"
            self._n_rounds += 1
            if number == 0:
                own = port
            elif meeting.node_rank == 0:
                listener = _listening(replace(meeting, port=0))
                own = int(listener.getsockname()[1])
                self._server = _store(meeting.host, own, listener)
                store.set(key, str(own))
            else:
                own = int(store.get(key))
            shared = torch_dist.PrefixStore(f"whet/round/{number}", store)  # pyright: ignore[reportPrivateImportUsage]
            return RendezvousInfo(
                shared, meeting.node_rank, meeting.n_nodes, RendezvousStoreInfo(meeting.host, own)
            )  # fmt: skip

        def get_backend(self) -> str:
            return "whet"

        @property
        def use_agent_store(self) -> bool:
            return True

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "whet"

        def shutdown(self) -> bool:
            return True

    return Rounds()


def _answers(meeting: Meeting, port: int, asked: _Asked) -> bool:
    """Return whether node 0 answers; False if this process is asked to end meanwhile. Raises ConfigError."""
    until, say_at, reason = time.monotonic() + meeting.within_s, time.monotonic() + _SAYS_AFTER_S, ""
    while not asked.to_end:
        try:
            socket.create_connection((meeting.host, port), _CONNECTS_S).close()
            return True
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        if time.monotonic() > until:
            raise ConfigError(
                what="node 0 does not answer",
                got=f"{meeting.host} port {port}, tried for {meeting.within_s:g} s: {reason}",
                why="the launcher of every node connects to that of node 0",
                fix="start the launcher there with --node_rank 0 and the same --master_port, open all TCP ports "
                "between the nodes, and give an address of node 0 that leads there: --master_addr ADDRESS",
            )
        if time.monotonic() > say_at:
            rank.say(f"waiting for node 0 at {meeting.host} port {port} ({reason})")
            say_at = time.monotonic() + _SAYS_EVERY_S
        time.sleep(_TRIES_EVERY_S)
    return False


def _all_came(store: Any, meeting: Meeting, port: int, asked: _Asked) -> bool:
    """Return whether all nodes have come; False if this process is asked to end meanwhile. Raises ConfigError."""
    if meeting.n_nodes == 1:
        return True
    keys = [f"whet/node/{number}" for number in range(meeting.n_nodes)]
    own = f"{platform.node()} {secrets.token_hex(8)}"
    if (there := store.compare_set(keys[meeting.node_rank], "", own).decode()) != own:
        raise ConfigError(
            what=f"node {meeting.node_rank} has joined already",
            got=f"--node_rank {meeting.node_rank} here, and on {there.split()[0]}",
            why="every node has a number of its own",
            fix=f"use another --node_rank here, from 0 to {meeting.n_nodes - 1}",
        )
    until, say_at = time.monotonic() + meeting.within_s, time.monotonic() + _SAYS_AFTER_S
    while missing := [number for number, key in enumerate(keys) if not store.check([key])]:
        names = ", ".join(map(str, missing))
        if asked.to_end:
            return False
        if time.monotonic() > until:
            raise ConfigError(
                what=f"node {names} did not join",
                got=f"{meeting.n_nodes - len(missing)} of {meeting.n_nodes} nodes within {meeting.within_s:g} s",
                why="the ranks of all nodes start together",
                fix=f"start the launcher there with --nnodes {meeting.n_nodes} --node_rank {missing[0]}, and the same "
                "--master_addr and --master_port; --join_timeout_s waits longer",
            )
        if time.monotonic() > say_at:
            rank.say(f"waiting for node {names} of {meeting.n_nodes} at {meeting.host} port {port}")
            say_at = time.monotonic() + _SAYS_EVERY_S
        time.sleep(_TRIES_EVERY_S)
    return True


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
    elif failed is None and not last:  # the launcher of several hosts is gone before any rank ran
        code = EXIT_IO
    return Outcome(code, failed, stopped_by)


@contextmanager
def _signals(folder: Path) -> Iterator[_Asked]:
    """Pass the signals that ask this process to end on to the ranks, instead of ending it, within the block.

    Signals that follow the first at once are not passed on.
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
        interrupts, asked.interrupts = asked.interrupts, None
        asked.no_restart = True
        if interrupts is not None:
            interrupts()

    with rank.handled({**dict.fromkeys(rank.ENDING, note), rank.no_restart(): end}):
        yield asked


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
def listens(meeting: Meeting) -> Iterator[socket.socket | None]:
    """Listen where the others find node 0, if this is node 0: on one machine at the loopback interface alone.

    On several nodes it is the interface of the address that the others use; all of them if that is no address of this
    machine, as behind a router, or if it means this machine alone here, as 127.0.1.1.
    """
    if meeting.node_rank:
        yield None
        return
    try:
        listener = _listening(meeting)
    except OSError as error:
        raise ConfigError(
            what="the master port is not free",
            got=f"port {meeting.port}: {error.strerror}",
            why="the ranks find each other there",
            fix=f"end the program that uses it (ss -ltnp 'sport = :{meeting.port}'), or use another --master_port",
        ) from error
    with listener:
        yield listener


def _listening(meeting: Meeting) -> socket.socket:
    if meeting.n_nodes == 1:
        return socket.create_server((_LOOPBACK, meeting.port or 0), backlog=256)
    own = network.addresses()
    for address in network.resolve(meeting.host)[0]:
        if address in own:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, meeting.port or 0), family=family, backlog=256)
    return network.listening(meeting.port or 0)


@contextmanager
def _logs(log_dir: Path, node_rank: int | None) -> Iterator[None]:
    """Lock the folder of the logs for the ranks of this node within the block; None: for a single rank, which has none.

    The kernel releases the lock when this process ends, even if it is killed. Raises OutputError, before any rank runs,
    if another launcher has it or the logs cannot be written.
    """
    if node_rank is None:
        yield
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=log_dir).close()
        handle = (log_dir / f".node-{node_rank}.lock").open("a")
    except OSError as error:
        raise OutputError(
            what="the logs of the ranks cannot be written",
            got=str(error),
            why="rank 0 prints to the terminal, and each other rank to a file of its own",
            fix="name a folder that this user can write in --log_dir",
        ) from error
    with handle:
        _lock(handle.fileno(), log_dir)
        yield


def _lock(handle: int, log_dir: Path) -> None:
    try:
        system.lock(handle)
    except OSError as error:
        if error.errno not in system.LOCKED:
            rank.say(f"{log_dir} cannot be locked ({error.strerror}): start no second launcher with this --log_dir")
            return
        raise OutputError(
            what="another whet launch writes the logs of its ranks there",
            got=f"--log_dir {log_dir}",
            why="the ranks of both would overwrite each other's rank-N.log",
            fix="use another --log_dir, start it in another folder, or end the other launcher",
        ) from error


def _quieten() -> None:
    """Leave what torch's agent logs out, unless LOGLEVEL asks for it: the launcher says how ranks ended."""
    if "LOGLEVEL" not in os.environ:
        theirs = logging.getLogger("torch.distributed.elastic")
        theirs.addHandler(logging.NullHandler())
        theirs.propagate = False
