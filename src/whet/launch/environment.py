"""The variables that a rank is started with: its place among the ranks, its threads, its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.launch.libraries import Preload
from whet.launch.plan import RankPlan

_OURS = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
"""Variables that the user may have set, and that the launcher decides."""
_BINDS_THREADS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")
"""Variables that bind threads one by one: they would bind all processes of a rank to the cores of its first."""


@dataclass(frozen=True)
class Placement:
    """Where a rank stands among all ranks of a run."""

    rank: int
    n_ranks: int
    local_rank: int
    n_local: int
    node_rank: int
    """The number of its host."""
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """Return the variables by which torch.distributed finds the other ranks; none for a rank that is alone."""
        if self.n_ranks == 1:
            return {}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.n_ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.n_local),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def variables(
    inherited: Mapping[str, str], plan: RankPlan, placement: Placement, preload: Preload
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a rank, and a note for each variable of the user's that had to give way."""
    kept = {name: value for name, value in inherited.items() if name not in _BINDS_THREADS}
    wanted = {"OMP_NUM_THREADS": str(plan.n_threads), **placement.variables(), **_of_libraries(inherited, preload)}
    notes = [
        f"{name}={inherited[name]} is left out: the launcher binds ranks, not threads"
        for name in inherited.keys() - kept
    ]
    notes += [
        f"{name}={inherited[name]} gives way to the launcher's {wanted[name]}"
        for name in _OURS
        if name in wanted and inherited.get(name, wanted[name]) != wanted[name]
    ]
    return kept | wanted, notes


def _of_libraries(inherited: Mapping[str, str], preload: Preload) -> dict[str, str]:
    found: dict[str, str] = {}
    if preload.paths:
        before = [path for path in inherited.get("LD_PRELOAD", "").replace(":", " ").split() if path]
        found["LD_PRELOAD"] = ":".join([*before, *(str(path) for path in preload.paths)])
    if preload.openmp is not None:
        found["KMP_BLOCKTIME"] = inherited.get("KMP_BLOCKTIME", "1")
    return found
