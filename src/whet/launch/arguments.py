"""The options of `whet launch`."""

import re
from dataclasses import dataclass, fields

from whet.config.rules.ranges import Rule, at_least, broken_if, within
from whet.config.rules.training import LAUNCH_LOGS_NAME
from whet.config.settings import checked
from whet.errors import Problem
from whet.launch.start import Allocator, OpenMP

_RULES: tuple[Rule, ...] = (
    broken_if(
        "ranks_are_auto_or_a_number",
        ("nproc_per_node",),
        lambda asked: asked.nproc_per_node != "auto" and not re.fullmatch("[0-9]+", asked.nproc_per_node),
        what="nproc_per_node is neither auto nor a number",
        why="auto starts one rank for each NUMA node; a number starts that many",
        fix="use --nproc_per_node auto, or --nproc_per_node 2",
    ),
    at_least("max_restarts", 0, "it is a count"),
    at_least("kept_free_cores", 0, "it is a count"),
)


@checked(headings={"nproc_per_node": "Launch"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchArguments:
    """How many ranks are started, and on what."""

    nproc_per_node: str = "auto"
    """Ranks on this machine: a number, or auto for one for each NUMA node."""
    kept_free_cores: int | None = None
    """Cores of each rank that are left for communication, loader processes and the system. Default: 1 where a rank has
    8 cores or more and is not alone."""
    memory_allocator: Allocator = "auto"
    """The allocator that is preloaded; auto takes that of LD_PRELOAD, else tcmalloc or jemalloc where installed."""
    openmp: OpenMP = "auto"
    """The OpenMP library that serves torch; auto takes that of LD_PRELOAD, else Intel's libiomp5 where installed."""
    max_restarts: int = 0
    """Start all ranks again after a failure, at most this often. whet's own commands that train, and
    scripts with a whet.Trainer, then resume from their newest checkpoint."""
    log_dir: str = LAUNCH_LOGS_NAME
    """Folder for the output of all ranks but rank 0, which writes to the terminal."""
    dry_run: bool = False
    """Print the plan, start nothing."""
    command: tuple[str, ...] = ()
    """The command, after `--`."""


def hosts_are_given_once(asked: "HostsArguments") -> Problem | None:
    """The hosts come from one place."""
    given = [name for name in ("hosts", "hostfile") if getattr(asked, name)]
    given += ["nnodes"] if asked.nnodes > 1 else []
    if len(given) < 2:
        return None
    return Problem(
        what="the hosts are given in two ways",
        got=", ".join(f"--{name} {getattr(asked, name)}" for name in given),
        why="--hosts and --hostfile start ranks over ssh; with --nnodes you start one launcher on each node yourself",
        fix=f"keep --{given[0]} only",
    )


_BY_SSH = ("ssh_command", "python", "working_dir", "env", "connect_timeout_s", "heartbeat_timeout_s")
_BY_HAND = ("node_rank", "join_timeout_s")


def options_have_an_effect(asked: "HostsArguments") -> Problem | None:
    """An option that the chosen way of starting does not use is refused, not ignored."""
    over_ssh, usual = bool(asked.hosts or asked.hostfile), {one.name: one.default for one in fields(asked)}
    ignored = [] if over_ssh else [(name, "--hosts or --hostfile") for name in _BY_SSH]
    ignored += [] if asked.nnodes > 1 else [(name, "--nnodes 2 or more") for name in _BY_HAND]
    ignored += [] if asked.several else [("master_addr", "--hosts, --hostfile or --nnodes 2 or more")]
    for name, needs in ignored:
        if getattr(asked, name) != usual[name]:
            return Problem(
                what=f"{name} has no effect here",
                got=f"--{name} {getattr(asked, name)}",
                why=f"it is for {needs}",
                fix=f"leave --{name} out" if asked.several else f"add {needs}, or leave --{name} out",
            )
    return None


@checked(
    headings={"hosts": "Several hosts"},
    rules=(
        hosts_are_given_once,
        broken_if(
            "node_rank_is_one_of_the_nodes",
            ("nnodes", "node_rank"),
            lambda asked: not 0 <= asked.node_rank < asked.nnodes,
            what="node_rank is not the number of a node",
            why="nodes are numbered from 0 to nnodes - 1",
            fix="start the launcher once on each node: --nnodes 2 --node_rank 0 on the first, --node_rank 1 on the "
            "second",
        ),
        broken_if(
            "nodes_know_the_first",
            ("nnodes", "master_addr"),
            lambda asked: asked.nnodes > 1 and not asked.master_addr,
            what="master_addr is missing",
            why="the launchers of the other nodes connect to that of node 0",
            fix="add --master_addr with the address of node 0, the same on every node",
        ),
        options_have_an_effect,
        within("master_port", "[1, 65535]", "it is a TCP port", 29500),
        at_least("connect_timeout_s", 1, "a host takes some time to answer"),
        at_least("heartbeat_timeout_s", 3, "a sign of life takes some time"),
        at_least("join_timeout_s", 1, "a launcher takes some time to start"),
    ),
)
@dataclass(frozen=True, kw_only=True, slots=True)
class HostsArguments:
    """Which hosts the ranks run on, and how the launcher reaches them."""

    hosts: str | None = None
    """Hosts to start ranks on over ssh, such as node1,node2:4. A number after the colon is the host's number of ranks;
    without one the host's own topology decides. The first host gets rank 0."""
    hostfile: str | None = None
    """File with one host on each line, as for MPI: node1, node1 slots=4, or node1:4."""
    nnodes: int = 1
    """Number of nodes, when you start one launcher on each node yourself, without ssh."""
    node_rank: int = 0
    """Number of this node, from 0, with --nnodes."""
    master_addr: str | None = None
    """Address of the first host, through which all hosts reach it. Default over ssh: the one that ssh uses."""
    master_port: int | None = None
    """TCP port on the first host. Default: a free one over ssh, 29500 with --nnodes."""
    ssh_command: str = "ssh"
    """The program that runs a command on a host, with its options, such as "ssh -F FILE"."""
    python: str | None = None
    """Python on the hosts. Default: the path of the one that runs this launcher."""
    working_dir: str | None = None
    """Working folder on the hosts. Default: the current one, under the same path."""
    env: tuple[str, ...] = ()
    """More variables for the ranks: NAME passes the launcher's value, NAME=VALUE sets one. Those of Hugging Face,
    torch, whet, OpenMP, gloo and Python are passed anyway."""
    connect_timeout_s: float = 15.0
    """Seconds that a host has to answer over ssh."""
    heartbeat_timeout_s: float = 15.0
    """Seconds without a sign of life over ssh after which a host counts as lost and all ranks are stopped."""
    join_timeout_s: float = 300.0
    """Seconds that the launchers of --nnodes wait for each other."""

    @property
    def several(self) -> bool:
        """Whether the run goes through hosts, rather than this machine alone."""
        return bool(self.hosts or self.hostfile) or self.nnodes > 1
