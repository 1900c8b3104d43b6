"""The plan of a host as text: its sockets and NUMA nodes, and which rank computes where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whet.console import amount, plural
from whet.hardware.rank_plan import RankPlan
from whet.hardware.topology import Topology


def drawn(host: str, topology: Topology, ranks: Sequence[RankPlan], first_rank: int | None = 0) -> list[str]:
    """Return the lines of a host, the nodes one below the other with their ranks; `first_rank` may be unknown."""
    head = f"{host}: {plural(len(topology.sockets), 'socket')}, {plural(len(topology.nodes), 'NUMA node')}, "
    head += f"{plural(len(topology.cores), 'core')} usable"
    rows = [("", *_rank(rank, first_rank)) for rank in ranks if len(rank.nodes) > 1]
    for node in topology.nodes:
        own = [rank for rank in ranks if rank.nodes == (node,)]
        rows += [(_node(topology, node, first=not n), *_rank(rank, first_rank)) for n, rank in enumerate(own)]
        if not own:
            rows.append((_node(topology, node, first=True), "", "" if rows and not rows[0][0] else "not used"))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return [head, *(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows)]


def rows_of_step(n_ranks: int) -> list[str]:
    """Return the lines that say how many rows a step of a training by whet has on so many ranks."""
    return [
        f"  a step has {n_ranks} times the rows of one process: each rank takes its own",
        "  (--nproc_per_node 1 keeps the step)",
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as 0-3,8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _node(topology: Topology, node: int, *, first: bool) -> str:
    if not first:
        return ""
    socket = topology.of_node(node)[0].socket
    memory = f", {amount(topology.node_bytes[node])}" if node in topology.node_bytes else ""
    return f"socket {socket}, node {node}{memory}"


def _rank(rank: RankPlan, first_rank: int | None) -> tuple[str, str]:
    free = f", {plural(rank.kept_free, 'core')} kept free" if rank.kept_free else ""
    name = f"local rank {rank.local_rank}" if first_rank is None else f"rank {first_rank + rank.local_rank}"
    return f"CPUs {ranges(rank.cpus)}", f"{name}: {plural(rank.n_threads, 'thread')}{free}"
