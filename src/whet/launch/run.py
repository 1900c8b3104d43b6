"""`whet launch` from its options to the exit code: plan, picture, start, restarts."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whet import console
from whet.errors import EXIT_OK, ConfigError
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.hardware.topology import Topology
from whet.launch import command, environment, libraries, local, picture
from whet.launch.arguments import LaunchArguments
from whet.launch.environment import Placement
from whet.launch.hosts.arguments import HostsArguments
from whet.launch.hosts.job import NOT_RESTARTED, Job
from whet.launch.hosts.joined import run_joined
from whet.launch.hosts.over_ssh import run_over_ssh
from whet.launch.libraries import Preload


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
    master = several.master_addr or "127.0.0.1"
    for attempt in range(asked.max_restarts + 1):
        port = several.master_port or local.free_port()
        places = [
            Placement(n, len(ranks), n, len(ranks), 0, master, port, restart=attempt, max_restarts=asked.max_restarts)
            for n in range(len(ranks))
        ]
        outcome = local.run(_starts(line, ranks, preload, Path(asked.log_dir), places))
        if outcome.code in NOT_RESTARTED or outcome.stopped_by is not None or attempt == asked.max_restarts:
            break
        _say_failed(outcome)
        _say(f"restart {attempt + 1} of {asked.max_restarts}")
    _say_failed(outcome)
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
    for line in picture.drawn(local.host_name(), own, ranks):
        print(line, file=sys.stderr)
    if quota is not None and quota < len(own.cores):
        _say(f"  a cgroup grants {quota:g} of these cores: threads are fewer, and not bound to single cores")
    loaded = ", ".join(path.name for path in preload.paths)
    _say(f"  preloaded: {loaded or 'nothing: no library is installed, or none is wanted'}")


def _starts(
    line: Sequence[str],
    ranks: Sequence[RankPlan],
    preload: Preload,
    logs: Path,
    places: Sequence[Placement],
) -> list[local.RankStart]:
    """Return what each rank is started with."""
    found: list[local.RankStart] = []
    for plan, place in zip(ranks, places, strict=True):
        number = place.rank
        variables, notes = environment.variables(os.environ, plan, place, preload)
        for note in notes if not place.restart and not number else ():
            _say(f"  {note}")
        found.append(
            local.RankStart(
                rank=number,
                command=line,
                environment=variables,
                cpus=plan.cpus,
                nodes=plan.nodes,
                preload=[str(path) for path in preload.paths],
                log=logs / f"rank-{number}.log" if number else None,
                restart=place.restart,
            )
        )
    return found


def _say_failed(outcome: local.Outcome) -> None:
    """Say which rank failed, with the end of its output if that is in a file."""
    failed = outcome.failed
    if failed is None or outcome.stopped_by is not None:
        return
    how = f"was killed by signal {outcome.code - 128}" if outcome.code > 128 else f"ended with exit code {outcome.code}"
    _say(f"rank {failed.rank} {how}; all ranks were stopped")
    if failed.log is not None:
        _say(f"the end of {failed.log}:")
        for line in local.tail(failed.log):
            print(f"  | {line}", file=sys.stderr)


def _say(text: str) -> None:
    """Print a line of the launcher's own, apart from what rank 0 prints."""
    for line in console.folded_message(text, console.width(), "    "):
        print(line, file=sys.stderr, flush=True)


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            what="whet launch runs on Linux",
            got=sys.platform,
            why="it binds processes to cores through calls of the Linux kernel",
            fix="run the command without the launcher",
        )
