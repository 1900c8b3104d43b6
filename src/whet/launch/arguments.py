"""The options of `whet launch`."""

from dataclasses import dataclass

from whet.config.settings import checked
from whet.errors import Problem
from whet.launch.libraries import Allocator, OpenMP


def ranks_are_auto_or_a_number(asked: "LaunchArguments") -> Problem | None:
    """The number of ranks is a whole number, or left to the machine."""
    if asked.nproc_per_node == "auto" or (asked.nproc_per_node.isascii() and asked.nproc_per_node.isdigit()):
        return None
    return Problem(
        what="nproc_per_node is neither auto nor a number",
        got=asked.nproc_per_node,
        why="auto starts one rank for each NUMA node; a number starts that many",
        fix="use --nproc_per_node auto, or --nproc_per_node 2",
    )


def counts_are_not_negative(asked: "LaunchArguments") -> Problem | None:
    """No count is below zero."""
    for name in ("max_restarts", "kept_free_cores"):
        value = getattr(asked, name)
        if value is not None and value < 0:
            return Problem(what=f"{name} is below 0", got=value, why="it is a count", fix=f"use --{name} 0 or more")
    return None


@checked(headings={"nproc_per_node": "Launch"}, rules=(ranks_are_auto_or_a_number, counts_are_not_negative))
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchArguments:
    """How many ranks are started, and on what."""

    nproc_per_node: str = "auto"
    """Ranks on this machine: a number, or auto for one for each NUMA node."""
    kept_free_cores: int | None = None
    """Cores of each rank that are left for communication, loader processes and the system. Default: 1 where a rank has
    8 cores or more and is not alone."""
    memory_allocator: Allocator = "auto"
    """The allocator that is preloaded; auto takes tcmalloc, then jemalloc, where one is installed."""
    openmp: OpenMP = "auto"
    """The OpenMP library that serves torch; auto preloads Intel's libiomp5 where it is installed."""
    max_restarts: int = 0
    """Start all ranks again after a failure, at most this often. whet's own commands that train, and
    scripts with a whet.Trainer, then resume from their newest checkpoint."""
    log_dir: str = "launch-logs"
    """Folder for the output of all ranks but rank 0, which writes to the terminal."""
    dry_run: bool = False
    """Print the plan, start nothing."""
    command: tuple[str, ...] = ()
    """The command, after `--`."""
