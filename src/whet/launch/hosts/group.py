"""The run on all hosts: output and signals are passed on, and all ranks stopped when one fails or a host is lost."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from whet.errors import EXIT_IO, EXIT_OK, EXIT_STOPPED_AND_SAVED
from whet.launch.agent.channel import Message, Silence
from whet.launch.child import STOP_S
from whet.launch.hosts.member import Member
from whet.launch.hosts.preflight import Ready
from whet.launch.local import SAVE_S, signals_noted

_EVERY_S = 0.02
_ANSWERS_S = STOP_S + 0.7
"""How long a host has to say that its ranks have ended, after it was asked to stop them."""
_ENDS_BEFORE_S = 0.3
"""How long reports of failures still count: the peers of a rank that failed fail too, and may be noticed earlier."""


@dataclass(frozen=True)
class Failure:
    """What ended the run."""

    code: int
    who: str
    """The rank or host that failed, and how."""
    at: float
    """When, by this machine's clock."""
    log: str = ""
    tail: Sequence[str] = ()


@dataclass
class Outcome:
    """How the run ended."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: signal.Signals | None = None

    @property
    def first(self) -> Failure | None:
        """The failure that came first; the others may follow from it."""
        return min(self.failures, key=lambda one: one.at, default=None)

    @property
    def code(self) -> int:
        """The exit code of the first rank that failed, 0 if none did."""
        return self.first.code if self.first is not None else EXIT_OK


class Printer:
    """Writes what ranks print, apart from the loop that watches them: a terminal may stand still."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, number: int, text: str) -> None:
        """Write to standard output (1) or standard error (2), in the order of the calls."""
        self._waiting.put((number, text.encode("utf-8", "surrogateescape")))

    def finish(self, within_s: float | None) -> None:
        """Return when all is written; None waits as long as the reader does."""
        self._waiting.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            number, data = item
            with suppress(OSError):  # a reader that is gone does not end the run
                while data:
                    data = data[os.write(number, data) :]


class Group:
    """All hosts of a run, from the start of the ranks to their end."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._printer = Printer()
        self._outcome = Outcome()
        self._noted: list[signal.Signals] = []
        """Signals to this process."""
        self._asked: list[signal.Signals] = []
        """Those, and signals to the launchers of other nodes: one that reaches several of them counts once."""
        self._n_passed_on = 0
        self._stopped_at = float("inf")
        self._stop_at = float("inf")

    def run(self, ready: Ready, heartbeat_timeout_s: float) -> Outcome:
        """Start the ranks and return when all hosts are done."""
        with signals_noted(self._noted):
            for number, member in enumerate(self._members):
                place = ready.place(member, number)
                member.channel.send(ask="start", heartbeat_timeout_s=heartbeat_timeout_s, **place)
            silences = {member.name: Silence(member.channel) for member in self._members}
            while not all(member.over for member in self._members):
                self._step(silences, heartbeat_timeout_s)
                time.sleep(_EVERY_S)
        self._outcome.stopped_by = self._asked[0] if self._asked else None
        self._printer.finish(None if not self._outcome.failures else STOP_S)
        return self._outcome

    def _step(self, silences: dict[str, Silence], heartbeat_timeout_s: float) -> None:
        self._pass_signals_on()
        for member in (one for one in self._members if not one.over):
            ended = member.channel.ended.is_set()  # before the messages are taken: nothing comes after it
            for message in member.channel.received():
                self._take(member, message)
            if member.over:
                continue
            if ended:
                self._lose(member, self._how_it_ended(member))
            elif silences[member.name].seconds() > heartbeat_timeout_s:
                self._lose(
                    member, f"gave no sign for {heartbeat_timeout_s:g} s: the host stands still or its link is cut"
                )
            elif time.monotonic() > self._stopped_at + _ANSWERS_S:
                self._lose(member, "did not stop its ranks in time")
        if time.monotonic() > self._stop_at:
            self._stop()

    def _pass_signals_on(self) -> None:
        """Have all hosts pass a signal to their ranks: one that came here, or to the launcher of another node."""
        self._asked += self._noted[len(self._asked) :]
        if len(self._asked) <= self._n_passed_on:
            return
        self._n_passed_on = len(self._asked)
        self._stop_at = min(self._stop_at, time.monotonic() + SAVE_S)
        for member in self._members:
            member.channel.send(signal=int(self._asked[-1]), n=self._n_passed_on)

    def _take(self, member: Member, message: Message) -> None:
        """Do what a message of a host asks for."""
        if "output" in message:
            self._printer.put(message["to"], message["output"])
        elif "alone_s" in message:
            who = f"{member.name} had no sign of the launcher for {message['alone_s']:g} s, and stopped its ranks"
            self._fail(Failure(EXIT_IO, who, message["at"] - member.clock_ahead_s))
        elif "signal" in message:
            self._asked += [signal.Signals(message["signal"])] * (message["n"] - len(self._asked))
        elif "failed" in message:
            code, at = int(message["code"]), message["at"] - member.clock_ahead_s
            who = f"rank {message['failed']} on {member.name} {_how(code)}"
            self._fail(Failure(code, who, at, message["log"], message["tail"]))
        elif "ended" in message:
            member.over = True

    def _fail(self, failure: Failure) -> None:
        if time.monotonic() < self._stopped_at + _ENDS_BEFORE_S:
            self._outcome.failures.append(failure)
        if failure.code == EXIT_STOPPED_AND_SAVED:
            self._stop_at = min(self._stop_at, time.monotonic() + SAVE_S)
        elif not self._asked:
            self._stop()

    def _stop(self) -> None:
        """Have every host stop its ranks, once."""
        if self._stopped_at < float("inf"):
            return
        self._stopped_at = time.monotonic()
        self._stop_at = float("inf")
        for member in self._members:
            member.channel.send(ask="stop")

    def _lose(self, member: Member, how: str) -> None:
        """Count a host as lost, and have it end by itself if it still can: its connection is closed."""
        member.over = True
        threading.Thread(target=member.close, daemon=True).start()
        self._fail(Failure(EXIT_IO, f"{member.name} {how}", time.time()))
        self._stop()

    @staticmethod
    def _how_it_ended(member: Member) -> str:
        code = member.process.poll() if member.process is not None else None
        said = f": {' '.join(member.said[-2:])}" if member.said else ""
        return f"is lost: its connection ended{'' if code is None else f' with exit code {code}'}{said}"


def _how(code: int) -> str:
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
