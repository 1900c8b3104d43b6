"""Launchers that were started by hand, one on each node: those of the others connect to that of node 0.

They use no ssh. Each launcher serves node 0 as the agent of its own node, with its own command: what comes over the
network decides when ranks start and which numbers they get, never what is executed.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from whet.errors import EXIT_BAD_CONFIG, EXIT_IO, EXIT_OK, ConfigError, WhetError
from whet.hardware import network
from whet.launch.agent.channel import Channel
from whet.launch.agent.serve import Agent
from whet.launch.hosts import ssh
from whet.launch.hosts.group import Group
from whet.launch.hosts.job import Job, is_last, say, show
from whet.launch.hosts.member import Member, close_all, opened
from whet.launch.hosts.preflight import prepare

_PORT = 29500
_INTRODUCES_S = 5.0
_SAYS_EVERY_S = 10.0
_TRIES_EVERY_S = 0.5
_CONNECT_S = 5.0


def run_joined(job: Job) -> int:
    """Run this node's ranks together with those of the other nodes; return the run's exit code."""
    return _lead(job) if job.hosts.node_rank == 0 else _follow(job)


def _lead(job: Job) -> int:
    """Run as node 0, which decides for all."""
    code, attempt, last = EXIT_OK, 0, False
    with closing(_listening(job)) as server:
        while not last:
            members: list[Member] = []
            over: dict[str, Any] = {"code": EXIT_BAD_CONFIG, "again": False, "said": "node 0 did not start the run"}
            try:
                _gather(job, server, members)
                ready = prepare(members, _specifications(job, restart=attempt), job.hosts.master_addr, _CONNECT_S)
                if not attempt:
                    show(members, ready, job)
                if job.asked.dry_run:
                    over = {"code": EXIT_OK, "again": False, "said": ""}
                    return EXIT_OK
                outcome = Group(members).run(ready, job.hosts.heartbeat_timeout_s)
                code, last = outcome.code, is_last(outcome, attempt, job.asked.max_restarts)
                attempt += 1
                over = {"code": code, "again": not last, "said": outcome.first.who if outcome.first else ""}
            except WhetError as error:
                over["said"] = str(error)
                raise
            finally:
                for member in members:
                    member.channel.send(ask="over", **over)
                close_all(members)
    return code


def _listening(job: Job) -> socket.socket:
    port = job.hosts.master_port or _PORT
    try:
        return network.listening(port)
    except OSError as error:
        raise ConfigError(
            what="the master port is not free",
            got=f"port {port}: {error.strerror}",
            why="the launchers of the other nodes connect to it",
            fix=f"end the program that uses it (ss -ltnp 'sport = :{port}'), or use another --master_port on all nodes",
        ) from error


def _gather(job: Job, server: socket.socket, members: list[Member]) -> None:
    """Fill in the members in the order of their numbers; raises ConfigError if some do not come in time."""
    own = f"node 0 ({os.uname().nodename})"
    members.append(opened(own, ssh.local_agent(sys.executable)))
    members[0].by_hand = True
    found: dict[int, Member] = {}
    until, say_at = time.monotonic() + job.hosts.join_timeout_s, time.monotonic() + 1
    server.settimeout(_TRIES_EVERY_S)
    while missing := [number for number in range(1, job.hosts.nnodes) if number not in found]:
        names = ", ".join(map(str, missing))
        if time.monotonic() > until:
            members += found.values()
            raise ConfigError(
                what=f"node {names} did not join",
                got=f"{len(found) + 1} of {job.hosts.nnodes} nodes within {job.hosts.join_timeout_s:g} s",
                why="the ranks of all nodes start together",
                fix=f"start the launcher there with --nnodes {job.hosts.nnodes} --node_rank {missing[0]}, and the same "
                f"--master_addr and --master_port; --join_timeout_s waits longer",
            )
        if time.monotonic() > say_at:
            say(f"waiting for node {names} of {job.hosts.nnodes} on port {server.getsockname()[1]}")
            say_at = time.monotonic() + _SAYS_EVERY_S
        _admit(job, server, found)
    members += [found[number] for number in sorted(found)]


def _admit(job: Job, server: socket.socket, found: dict[int, Member]) -> None:
    """Take one node that connects, if its number is right and free; say why to one that is not."""
    try:
        connection, peer = server.accept()
    except OSError:
        return
    channel = _channel(connection)
    hello = channel.receive(_INTRODUCES_S)
    if hello is None or "join" not in hello:
        channel.close()
        return
    number, name = int(hello["join"]), f"node {hello['join']} ({hello['name']})"
    if hello["nnodes"] != job.hosts.nnodes or not 0 < number < job.hosts.nnodes:
        refusal = f"node 0 was started with --nnodes {job.hosts.nnodes}, this one with --nnodes {hello['nnodes']}"
    elif number in found and not found[number].channel.ended.is_set():
        refusal = f"{found[number].name} has joined already: every node has a --node_rank of its own"
    else:
        found[number] = Member(name, channel, by_hand=True)
        return
    say(f"{name} at {peer[0]} is refused: {refusal}")
    channel.send(ask="over", code=EXIT_BAD_CONFIG, again=False, said=refusal)
    channel.close()


def _follow(job: Job) -> int:
    """Run as one of the other nodes."""
    while True:
        with _joined(job) as channel:
            over = Agent(channel, own=_own(job)).serve()
        if over is None:
            say("the connection to the launcher of node 0 ended; the ranks here were stopped")
            return EXIT_IO
        if over["again"]:
            continue
        if over["said"]:
            say(f"node 0: {over['said']}")
        return int(over["code"])


@contextmanager
def _joined(job: Job) -> Iterator[Channel]:
    """Connect to node 0 and introduce this node; raises ConfigError if node 0 does not answer in time."""
    channel = _channel(_connected(job))
    try:
        channel.send(join=job.hosts.node_rank, nnodes=job.hosts.nnodes, name=os.uname().nodename)
        yield channel
    finally:
        channel.close()


def _connected(job: Job) -> socket.socket:
    address, port = job.hosts.master_addr or "", job.hosts.master_port or _PORT
    until, say_at, reason = time.monotonic() + job.hosts.join_timeout_s, time.monotonic() + 1, ""
    while time.monotonic() < until:
        found, reason = network.resolve(address)
        for one in found:
            try:
                return socket.create_connection((one, port), _CONNECT_S)
            except OSError as error:
                reason = f"{one}: {error.strerror or error}"
        if time.monotonic() > say_at:
            say(f"waiting for node 0 at {address} port {port} ({reason})")
            say_at = time.monotonic() + _SAYS_EVERY_S
        time.sleep(_TRIES_EVERY_S)
    raise ConfigError(
        what="node 0 does not answer",
        got=f"{address} port {port}, tried for {job.hosts.join_timeout_s:g} s: {reason}",
        why="the launcher of every node connects to that of node 0",
        fix="start the launcher there with --node_rank 0 and the same --master_port, open this port in its firewall, "
        "and give an address of it that leads there: --master_addr ADDRESS",
    )


def _channel(connection: socket.socket) -> Channel:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with closing(connection):
        return Channel(os.dup(connection.fileno()), os.dup(connection.fileno()))


def _own(job: Job) -> Mapping[str, Any]:
    """Return what this node decides by itself."""
    own = job.specification("", n_ranks=job.n_ranks, port=0, word="", restart=0)
    of_node_0 = ("name", "word", "port", "restart", "max_restarts", "master_addr")
    return {name: value for name, value in own.items() if name not in of_node_0}


def _specifications(job: Job, *, restart: int) -> Callable[[Member], Mapping[str, Any]]:
    """Return the function that gives each node what it is asked to prepare."""
    word = secrets.token_hex(16)
    return lambda member: job.specification(member.name, n_ranks=job.n_ranks, port=0, word=word, restart=restart)
