"""The options of `whet launch`."""

from dataclasses import dataclass, fields

from whet.config.settings import checked
from whet.errors import Problem
from whet.launch.start import Allocator, OpenMP


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


def node_rank_is_one_of_the_nodes(asked: "HostsArguments") -> Problem | None:
    """The number of this node is below the number of nodes."""
    if asked.nnodes >= 1 and 0 <= asked.node_rank < asked.nnodes:
        return None
    return Problem(
        what="node_rank is not the number of a node",
        got=f"--nnodes {asked.nnodes} --node_rank {asked.node_rank}",
        why="nodes are numbered from 0 to nnodes - 1",
        fix="start the launcher once on each node: --nnodes 2 --node_rank 0 on the first, --node_rank 1 on the second",
    )


def nodes_know_the_first(asked: "HostsArguments") -> Problem | None:
    """Launchers that are started by hand find each other through the first node."""
    if asked.nnodes < 2 or asked.master_addr:
        return None
    return Problem(
        what="master_addr is missing",
        got=f"--nnodes {asked.nnodes}",
        why="the launchers of the other nodes connect to that of node 0",
        fix="add --master_addr with the address of node 0, the same on every node",
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


def ports_and_times_are_possible(asked: "HostsArguments") -> Problem | None:
    """A port is one of TCP's, a time is above 0."""
    if asked.master_port is not None and not 0 < asked.master_port < 65536:
        return _out_of_range("master_port", asked.master_port, "a TCP port is a number from 1 to 65535", "29500")
    for name, least_s in (("connect_timeout_s", 1), ("heartbeat_timeout_s", 3), ("join_timeout_s", 1)):
        if getattr(asked, name) < least_s:
            return _out_of_range(name, getattr(asked, name), f"it is a time of at least {least_s} s", "15")
    return None


def _out_of_range(name: str, got: object, why: str, example: str) -> Problem:
    return Problem(what=f"{name} is out of range", got=got, why=why, fix=f"use --{name} {example}")


@checked(
    headings={"hosts": "Several hosts"},
    rules=(
        hosts_are_given_once,
        node_rank_is_one_of_the_nodes,
        nodes_know_the_first,
        options_have_an_effect,
        ports_and_times_are_possible,
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
