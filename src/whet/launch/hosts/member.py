"""A host of the run, as the launcher holds it: the connection to its agent, and what is known of it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from whet.errors import ConfigError
from whet.launch.agent.channel import Channel
from whet.launch.agent.facts import Facts

_KEPT_LINES = 50
_ENDS_S = 0.5


@dataclass
class Member:
    """A host with its agent."""

    name: str
    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    """ssh, or the agent itself on this machine; None if the agent has connected by itself."""
    command: Sequence[str] = ()
    said: list[str] = field(default_factory=list)
    """The last lines that ssh printed."""
    facts: Facts | None = None
    clock_ahead_s: float = 0.0
    """How much its clock is ahead of this machine's."""
    address: str = ""
    """Its address on the network that leads to the first host."""
    interface: str = ""
    first_rank: int = 0
    over: bool = False
    """Whether its ranks have ended, or it is lost."""
    by_hand: bool = False
    """Whether its launcher was started by hand, with --nnodes."""

    def close(self) -> None:
        """End the connection; the agent then ends, and so do its ranks."""
        self.channel.close()
        if self.process is None:
            return
        try:
            self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDS_S)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def opened(name: str, command: Sequence[str]) -> Member:
    """Return a host whose agent is started by this command, and answers later."""
    try:
        process = subprocess.Popen(  # noqa: S603 (ssh, or our own agent)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            what=f"{name}: {command[0]} cannot be started on this machine",
            got=error.strerror,
            why="it starts the launcher's agent on the host",
            fix="install it (the package openssh-client has ssh), or correct --ssh_command or --python",
        ) from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    member = Member(name, Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())), process, command)
    process.stdin.close()
    process.stdout.close()
    threading.Thread(target=_keep_lines, args=(process.stderr, member.said), daemon=True).start()
    return member


def close_all(members: Sequence[Member]) -> None:
    """End all connections, at the same time."""
    threads = [threading.Thread(target=member.close) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _keep_lines(stream: IO[bytes], into: list[str]) -> None:
    with suppress(ValueError, OSError), stream:
        for line in stream:
            into.append(line.decode("utf-8", "replace").rstrip())
            del into[:-_KEPT_LINES]
