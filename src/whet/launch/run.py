"""`whet launch` from its options to the exit code: plan, picture, start, restarts."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whet import console
from whet.errors import EXIT_BAD_CONFIG, EXIT_OK, EXIT_STOPPED_AND_SAVED, ConfigError
from whet.hardware import cpu, topology
from whet.hardware.topology import Topology
from whet.launch import command, environment, libraries, local, picture
from whet.launch.arguments import LaunchArguments
from whet.launch.environment import Placement
from whet.launch.libraries import Preload
from whet.launch.plan import RankPlan, plan_ranks

_NOT_RESTARTED = frozenset({EXIT_OK, EXIT_STOPPED_AND_SAVED, EXIT_BAD_CONFIG})
"""Exit codes after which another start would end the same way, or is not wanted."""


def run_launch(asked: LaunchArguments, commands: Collection[str]) -> int:
    """Print the plan, run the ranks, and return the exit code of the first that failed, or 0."""
    _require_linux()
    line = command.command_line(asked.command, commands) if asked.command or not asked.dry_run else []
    own, ranks = planned(asked, one_process=asked.command[:1] != () and asked.command[0] in commands)
    preload = libraries.choose(asked.memory_allocator, asked.openmp)
    _show_plan(own, ranks, preload)
    if asked.dry_run:
        return EXIT_OK
    for attempt in range(asked.max_restarts + 1):
        outcome = local.run(_starts(line, ranks, preload, Path(asked.log_dir), first=not attempt))
        if outcome.code in _NOT_RESTARTED or outcome.stopped_by is not None or attempt == asked.max_restarts:
            break
        _say_failed(outcome)
        _say(f"restart {attempt + 1} of {asked.max_restarts}")
        line = command.resuming(line, commands)
    _say_failed(outcome)
    return outcome.code


def planned(asked: LaunchArguments, *, one_process: bool) -> tuple[Topology, tuple[RankPlan, ...]]:
    """Return the part of the machine that may be used, and the ranks on it.

    `one_process` is for whet's own commands, which do not train on several ranks yet.
    """
    usable = cpu.usable_cpus()
    own = topology.read(cpus=usable).within(usable)
    n_ranks = None if asked.nproc_per_node == "auto" else int(asked.nproc_per_node)
    if one_process:
        n_ranks = _one(n_ranks)
    return own, plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=n_ranks, kept_free=asked.kept_free_cores)


def _one(n_ranks: int | None) -> int:
    if n_ranks not in (None, 1):
        raise ConfigError(
            what="whet's own commands run in one process",
            got=f"--nproc_per_node {n_ranks}",
            why="each rank would train the complete run again, over the same output folder",
            fix="leave --nproc_per_node out: one process then uses all cores of this machine; a script of yours that "
            "uses torch.distributed may have several ranks",
        )
    return 1


def _show_plan(own: Topology, ranks: Sequence[RankPlan], preload: Preload) -> None:
    quota = cpu.quota_cores()
    for line in picture.drawn(local.host_name(), own, ranks):
        print(line, file=sys.stderr)
    if quota is not None and quota < len(own.cores):
        _say(f"  a cgroup grants {quota:g} of these cores: threads are fewer, and not bound to single cores")
    loaded = ", ".join(path.name for path in preload.paths)
    _say(f"  preloaded: {loaded or 'nothing: no library is installed, or none is wanted'}")


def _starts(
    line: Sequence[str], ranks: Sequence[RankPlan], preload: Preload, logs: Path, *, first: bool
) -> list[local.RankStart]:
    """Return what each rank is started with, with a port of its own for every attempt."""
    port, found = local.free_port(), []
    for plan in ranks:
        number = plan.local_rank
        place = Placement(number, len(ranks), number, len(ranks), 0, "127.0.0.1", port)
        variables, notes = environment.variables(os.environ, plan, place, preload)
        for note in notes if first and not number else ():
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
