"""What is launched on several hosts, and what the launcher prints about it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet import console
from whet.config.secrets import hidden
from whet.console import amount, plural
from whet.errors import EXIT_BAD_CONFIG, EXIT_OK, EXIT_STOPPED_AND_SAVED
from whet.launch.arguments import LaunchArguments
from whet.launch.hosts import checks
from whet.launch.hosts.arguments import HostsArguments
from whet.launch.hosts.group import Outcome
from whet.launch.hosts.master import resolved_otherwise
from whet.launch.hosts.member import Member
from whet.launch.hosts.preflight import Ready

NOT_RESTARTED = frozenset({EXIT_OK, EXIT_STOPPED_AND_SAVED, EXIT_BAD_CONFIG})
"""Exit codes after which another start would end the same way, or is not wanted."""


@dataclass(frozen=True)
class Job:
    """What is launched, and how."""

    asked: LaunchArguments
    hosts: HostsArguments
    commands: Collection[str]
    """The names of whet's own commands."""

    def specification(self, name: str, *, n_ranks: int | None, port: int, word: str, restart: int) -> dict[str, Any]:
        """Return what the agent of a host is asked to prepare."""
        return {
            "name": name,
            "word": word,
            "port": port,
            "n_ranks": n_ranks,
            "restart": restart,
            "max_restarts": self.asked.max_restarts,
            "command": list(self.asked.command),
            "commands": list(self.commands),
            "kept_free_cores": self.asked.kept_free_cores,
            "memory_allocator": self.asked.memory_allocator,
            "openmp": self.asked.openmp,
            "log_dir": self.asked.log_dir,
            "working_dir": None,
            "env": {},
            "master_addr": self.hosts.master_addr or "",
        }

    @property
    def n_ranks(self) -> int | None:
        """The number of ranks of a host for which nothing else is said; None: by its topology."""
        return None if self.asked.nproc_per_node == "auto" else int(self.asked.nproc_per_node)


def is_last(outcome: Outcome, attempt: int, max_restarts: int) -> bool:
    """Say how an attempt ended; return whether it was the last."""
    say_failed(outcome)
    if outcome.code in NOT_RESTARTED or outcome.stopped_by is not None or attempt == max_restarts:
        return True
    say(f"restart {attempt + 1} of {max_restarts}, on all hosts")
    return False


def show(members: Sequence[Member], ready: Ready, job: Job) -> None:
    """Print the picture of all hosts; for a dry run, the command of each host and rank too."""
    for member in members:
        shown = ready.shown[member.name]
        for line in shown["picture"]:
            print(line, file=sys.stderr)
        assert member.facts is not None
        free = f", {amount(member.facts.available_bytes)} of memory free" if member.facts.available_bytes else ""
        speed = ready.bytes_per_s.get(member.name)
        link = f", {8e-9 * speed:.1f} Gbit/s to the next host" if speed else ""
        loaded = ", ".join(shown["preloaded"]) or "nothing"
        say(f"  {member.address} on {member.interface}{link}{free}; preloaded: {loaded}")
        for note in shown["notes"]:
            say(f"  {note}")
        if job.asked.dry_run:
            _show_commands(member, shown)
    for line in [
        *checks.remarks(members, ready.bytes_per_s),
        *resolved_otherwise(members, job.hosts.master_addr, ready.master_addr),
    ]:
        say(line)
    size = f"{plural(ready.n_ranks, 'rank')} on {plural(len(members), 'host')}"
    say(f"{size}, master {ready.master_addr} port {ready.master_port}")


def _show_commands(member: Member, shown: Mapping[str, Any]) -> None:
    if member.command:
        print(f"  agent: {shlex.join(member.command)}", file=sys.stderr)
    for rank, variables in shown["variables"].items():
        words = [f"{name}={value}" for name, value in sorted(variables.items())]
        print(f"  rank {rank}: {shlex.join(hidden([*words, *shown['command']])[0])}", file=sys.stderr)


def say_failed(outcome: Outcome) -> None:
    """Say what failed first, with the end of the rank's output if that is in a file."""
    first = outcome.first
    if first is None or outcome.stopped_by is not None:
        return
    say(f"{first.who}; all ranks on all hosts were stopped")
    if first.log:
        say(f"the end of {first.log}:")
        for line in first.tail:
            print(f"  | {line}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line of the launcher's own, apart from what rank 0 prints."""
    for line in console.folded_message(text, console.width(), "    "):
        print(line, file=sys.stderr, flush=True)
