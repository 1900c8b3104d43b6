"""`whet launch` from its options to the exit code, on this machine: plan, picture, start."""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from whet import json_output, system
from whet.config.environment import LAUNCH
from whet.config.secrets import hidden
from whet.errors import EXIT_OK
from whet.hardware import cpu, network, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.hardware.topology import Topology
from whet.launch import elastic, picture, rank
from whet.launch.arguments import HostsArguments, LaunchArguments
from whet.launch.elastic import Meeting, Outcome
from whet.launch.rank import RankStart, Start
from whet.launch.start import (
    Preload,
    changed_variables,
    choose_libraries,
    command_line,
    require_restartable,
    require_words,
    runs_alone,
)

_USUAL_PORT = 29500


@dataclass(frozen=True)
class Plan:
    """What is started on this machine."""

    asked: LaunchArguments
    line: Sequence[str]
    topology: Topology
    ranks: Sequence[RankPlan]
    preload: Preload
    meeting: Meeting
    first_rank: int | None
    """The number of the first rank here; None if that is known only when all nodes have joined."""
    address: str
    """This machine's address on the network that leads to node 0, "" on one machine or without a route."""
    interface: str | None
    """The interface that leads to the other ranks; None if it is not known."""
    shares_step: bool = False
    """Whether this machine's ranks, whose number nobody asked for, train one model by a command of whet."""


def run_launch(
    asked: LaunchArguments, several: HostsArguments, commands: Collection[str], ranked: Collection[str]
) -> int:
    """Print the plan, run the ranks, and return the exit code of the first that failed, or 0.

    `commands` are the names of whet's own; those in `ranked` can run as several ranks.
    """
    require_startable(asked, several, commands, ranked)
    plan = planned(asked, several, commands, ranked, first_rank=None if several.nnodes > 1 else 0)
    ranks = [{"cpus": one.cpus, "nodes": one.nodes, "threads": one.n_threads} for one in plan.ranks]
    json_output.add(started=hidden(plan.line)[0], ranks=ranks, preloaded=list(plan.preload.every))
    if asked.dry_run:
        show(plan)
        return EXIT_OK
    outcome = started(plan)
    json_output.add(failed_rank=None if outcome.failed is None else asdict(outcome.failed))
    if outcome.stopped_by is not None:
        json_output.stop(f"stopped by {outcome.stopped_by.name}")
    return outcome.code


def require_startable(
    asked: LaunchArguments, several: HostsArguments, commands: Collection[str], ranked: Collection[str]
) -> None:
    """Raise ConfigError for what cannot be launched on any machine."""
    require_linux()
    require_restartable(asked.command, commands, asked.max_restarts)
    if _runs_alone(asked, commands, ranked) and (several.several or asked.nproc_per_node not in ("auto", "1")):
        raise runs_alone(asked.command[0], ranked)
    if not asked.dry_run:
        require_words(asked.command)


def require_linux() -> None:
    """Raise ConfigError if this machine starts no ranks."""
    system.require_linux(
        "whet launch runs on Linux",
        why="it binds processes to cores through calls of the Linux kernel",
        fix="run the command without the launcher",
    )


def planned(
    asked: LaunchArguments,
    several: HostsArguments,
    commands: Collection[str],
    ranked: Collection[str],
    *,
    first_rank: int | None,
) -> Plan:
    """Return what is started here: the ranks on the part of this machine that may be used, their command, libraries.

    A command that runs in one process gets all cores. Raises ConfigError.
    """
    line = command_line(asked.command, commands) if asked.command or not asked.dry_run else []
    usable = cpu.usable_cpus()
    own = topology.read(cpus=usable).within(usable)
    alone = _runs_alone(asked, commands, ranked)
    n_ranks = 1 if alone else None if asked.nproc_per_node == "auto" else int(asked.nproc_per_node)
    ranks = plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=n_ranks, kept_free=asked.kept_free_cores)
    preload = choose_libraries(asked.memory_allocator, asked.openmp)
    if several.nnodes == 1:
        meeting = Meeting(port=several.master_port)
        shares_step = n_ranks is None and len(ranks) > 1 and asked.command[:1] != () and asked.command[0] in ranked
        return Plan(asked, line, own, ranks, preload, meeting, first_rank, "", "lo", shares_step)
    meeting = Meeting(
        several.master_addr or "", several.master_port or _USUAL_PORT, several.nnodes, several.node_rank,
        several.join_timeout_s,
    )  # fmt: skip
    address, interface = _towards(meeting.host)
    return Plan(asked, line, own, ranks, preload, meeting, first_rank, address, interface or None)


def show(plan: Plan) -> None:
    """Print the plan."""
    quota, cores = cpu.quota_cores(), plan.topology.cores
    lines = picture.drawn(platform.node(), plan.topology, plan.ranks, plan.first_rank)
    for line in [*lines, *(picture.rows_of_step(len(plan.ranks)) if plan.shares_step else [])]:
        print(line, file=sys.stderr)
    if quota is not None and quota < len(cores):
        rank.say(f"  a cgroup grants {quota:g} of these cores: threads are fewer, and not bound to single cores")
    loaded = ", ".join(Path(name).name for name in plan.preload.every)
    reached = f"{plan.address} on {plan.interface}; " if plan.address else ""
    rank.say(f"  {reached}preloaded: {loaded or 'nothing: no library is installed, or none is wanted'}")


def started(plan: Plan, *, restarts: tuple[int, int] | None = None) -> Outcome:
    """Print the plan, run the ranks of this machine to their end, and say which failed; return how they ended.

    `restarts` is how often all machines were started before, and how often they may be, if a launcher of several hosts
    counts; None: torch's agent restarts the ranks.
    """
    if restarts is None or not restarts[0]:
        show(plan)
    start = Start(
        command=plan.line,
        preload=[str(path) for path in plan.preload.paths],
        log_dir=str(Path(plan.asked.log_dir).absolute()),
        launcher=os.getpid(),
        ranks=_starts(plan),
        restarts=restarts,
    )
    most = plan.asked.max_restarts if restarts is None else 0
    outcome = elastic.run(start, max_restarts=most, meeting=plan.meeting)
    failed = outcome.failed
    if failed is not None and failed.by_itself and outcome.stopped_by is None:
        rank.say_failed(failed)
    return outcome


def _runs_alone(asked: LaunchArguments, commands: Collection[str], ranked: Collection[str]) -> bool:
    return asked.command[:1] != () and asked.command[0] in set(commands) - set(ranked)


def _towards(host: str) -> tuple[str, str]:
    """Return this machine's address and interface on the network that leads to a host, "" without a route."""
    own = network.addresses()
    found = [network.interface_towards(ip, own) for ip in network.resolve(host)[0]]
    return next((one for one in found if one[1]), ("", ""))


def _starts(plan: Plan) -> list[RankStart]:
    """Return what each rank is started with, and say which of the user's variables had to give way."""
    found: list[RankStart] = []
    launch = os.environ.get(LAUNCH) or uuid.uuid4().hex  # that of a job, or of the launcher of all hosts
    alone = len(plan.ranks) == 1 and plan.meeting.n_nodes == 1
    for one in plan.ranks:
        variables, notes = changed_variables(
            os.environ, one, plan.preload, alone=alone, interface=plan.interface
        )  # fmt: skip
        for note in () if found else notes:
            rank.say(f"  {note}")
        found.append(RankStart(one.cpus, one.nodes, {**variables, LAUNCH: launch}))
    return found
