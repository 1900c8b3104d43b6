"""`whet launch --hosts`: the agent of every host is started over ssh."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.errors import EXIT_OK
from whet.launch.hosts import forwarded, names, ssh
from whet.launch.hosts.arguments import HostsArguments
from whet.launch.hosts.group import Group
from whet.launch.hosts.job import Job, is_last, show
from whet.launch.hosts.member import Member, close_all, opened
from whet.launch.hosts.names import Host
from whet.launch.hosts.preflight import prepare


def run_over_ssh(job: Job) -> int:
    """Run the command on all hosts; return the exit code of the first rank that failed, or 0."""
    named = job.hosts
    hosts = names.from_option(named.hosts) if named.hosts else names.from_file(Path(named.hostfile or ""))
    for attempt in range(job.asked.max_restarts + 1):
        with connected(hosts, named) as members:
            ready = prepare(
                members, _specifications(job, hosts, restart=attempt), named.master_addr, named.connect_timeout_s
            )
            if not attempt:
                show(members, ready, job)
            if job.asked.dry_run:
                return EXIT_OK
            outcome = Group(members).run(ready, named.heartbeat_timeout_s)
            for member in members:
                member.channel.send(ask="over", code=outcome.code)
        if is_last(outcome, attempt, job.asked.max_restarts):
            break
    return outcome.code


@contextmanager
def connected(hosts: Sequence[Host], asked: HostsArguments) -> Iterator[list[Member]]:
    """Start the agents of all hosts; end them at the end of the block."""
    python = asked.python or sys.executable
    members: list[Member] = []
    try:
        # one after the other, so that those that have started are ended if the next one cannot be
        for one in hosts:
            command = ssh.agent_command(one.name, asked.ssh_command, python, asked.connect_timeout_s)
            members.append(opened(one.name, command))
        yield members
    finally:
        close_all(members)


def _specifications(job: Job, hosts: Sequence[Host], *, restart: int) -> Callable[[Member], Mapping[str, Any]]:
    """Return the function that gives each host what it is asked to prepare."""
    word, folder = secrets.token_hex(16), job.hosts.working_dir or forwarded.working_folder()
    variables = forwarded.variables(job.hosts.env)
    slots = {host.name: host.slots or job.n_ranks for host in hosts}

    def specification(member: Member) -> Mapping[str, Any]:
        port = job.hosts.master_port or 0 if member.name == hosts[0].name else 0
        own = job.specification(member.name, n_ranks=slots[member.name], port=port, word=word, restart=restart)
        return {**own, "working_dir": folder, "env": variables}

    return specification
