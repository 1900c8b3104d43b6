"""`whet launch` from its options to the exit code: plan, picture, start, restarts."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whet.errors import EXIT_OK, ConfigError
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.hardware.topology import Topology
from whet.launch import command, elastic, environment, libraries, picture, rank
from whet.launch.arguments import LaunchArguments
from whet.launch.hosts.arguments import HostsArguments
from whet.launch.hosts.job import Job
from whet.launch.hosts.joined import run_joined
from whet.launch.hosts.over_ssh import run_over_ssh
from whet.launch.libraries import Preload
from whet.launch.rank import RankStart


def run_launch(
    asked: LaunchArguments, several: HostsArguments, commands: Collection[str], ranked: Collection[str]
) -> int:
    """Print the plan, run the ranks, and return the exit code of the first that failed, or 0.

    `commands` are the names of whet's own; those in `ranked` can run as several ranks.
    """
    _require_linux()
    command.require_restartable(asked.command, commands, asked.max_restarts)
    alone = asked.command[:1] != () and asked.command[0] in set(commands) - set(ranked)
    if alone and (several.several or asked.nproc_per_node not in ("auto", "1")):
        raise command.runs_alone(asked.command[0], ranked)
    if not asked.dry_run:
        command.require_words(asked.command)
    if several.several:
        job = Job(asked, several, commands)
        return run_joined(job) if several.nnodes > 1 else run_over_ssh(job)
    line = command.command_line(asked.command, commands) if asked.command or not asked.dry_run else []
    own, ranks = planned(asked, alone=alone)
    preload = libraries.choose(asked.memory_allocator, asked.openmp)
    _show_plan(own, ranks, preload)
    if asked.dry_run:
        return EXIT_OK
    outcome = elastic.run(
        line,
        _starts(ranks, preload),
        preload=preload.paths,
        log_dir=Path(asked.log_dir),
        port=several.master_port,
        max_restarts=asked.max_restarts,
    )
    if outcome.failed is not None and outcome.stopped_by is None:
        rank.say_failed(outcome.failed)
    return outcome.code


def planned(asked: LaunchArguments, *, alone: bool) -> tuple[Topology, tuple[RankPlan, ...]]:
    """Return the part of the machine that may be used, and the ranks on it.

    `alone` is for a command that runs in one process: it gets all cores.
    """
    usable = cpu.usable_cpus()
    own = topology.read(cpus=usable).within(usable)
    n_ranks = 1 if alone else None if asked.nproc_per_node == "auto" else int(asked.nproc_per_node)
    return own, plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=n_ranks, kept_free=asked.kept_free_cores)


def _show_plan(own: Topology, ranks: Sequence[RankPlan], preload: Preload) -> None:
    quota = cpu.quota_cores()
    for line in picture.drawn(os.uname().nodename, own, ranks):
        print(line, file=sys.stderr)
    if quota is not None and quota < len(own.cores):
        rank.say(f"  a cgroup grants {quota:g} of these cores: threads are fewer, and not bound to single cores")
    loaded = ", ".join(path.name for path in preload.paths)
    rank.say(f"  preloaded: {loaded or 'nothing: no library is installed, or none is wanted'}")


def _starts(ranks: Sequence[RankPlan], preload: Preload) -> list[RankStart]:
    """Return what each rank is started with, and say which of the user's variables had to give way."""
    found: list[RankStart] = []
    for plan in ranks:
        variables, notes = environment.changed(os.environ, plan, preload, alone=len(ranks) == 1)
        for note in () if found else notes:
            rank.say(f"  {note}")
        found.append(RankStart(plan.cpus, plan.nodes, variables))
    return found


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            what="whet launch runs on Linux",
            got=sys.platform,
            why="it binds processes to cores through calls of the Linux kernel",
            fix="run the command without the launcher",
        )
