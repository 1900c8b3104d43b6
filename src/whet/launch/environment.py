"""The variables that a rank is started with: its place among the ranks, its threads, its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.hardware.rank_plan import RankPlan
from whet.launch.libraries import Preload

_OURS = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
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
    interface: str = "lo"
    """The network interface that leads to the other ranks."""
    restart: int = 0
    """How often the ranks have been started again after a failure."""
    max_restarts: int = 0

    def variables(self) -> dict[str, str]:
        """Return the variables by which a rank finds the others, if there are others, and knows of restarts."""
        restarts = {
            "TORCHELASTIC_RESTART_COUNT": str(self.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }
        if self.n_ranks == 1:
            return restarts
        return {
            **restarts,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.n_ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.n_local),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "GLOO_SOCKET_IFNAME": self.interface,
        }


def variables(
    inherited: Mapping[str, str], plan: RankPlan, placement: Placement, preload: Preload
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a rank, and a note for each variable of the user's that had to give way."""
    changes, notes = changed(inherited, plan, preload, alone=placement.n_ranks == 1)
    found = {**inherited, **changes, **placement.variables()}
    return {name: value for name, value in found.items() if value is not None}, notes


def changed(
    inherited: Mapping[str, str], plan: RankPlan, preload: Preload, *, alone: bool, interface: str = "lo"
) -> tuple[dict[str, str | None], list[str]]:
    """Return the variables of a rank that differ from what it inherits, and a note for each that had to give way.

    None: the variable is left out. `interface` is the network interface that leads to the other ranks.
    """
    found: dict[str, str | None] = {"OMP_NUM_THREADS": str(plan.n_threads), **_of_libraries(inherited, preload)}
    if not alone:
        found["GLOO_SOCKET_IFNAME"] = interface
        found["PYTHONUNBUFFERED"] = inherited.get("PYTHONUNBUFFERED", "1")  # it may be killed, and lose its last lines
    left_out = [name for name in _BINDS_THREADS if name in inherited]
    notes = [f"{name}={inherited[name]} is left out: the launcher binds ranks, not threads" for name in left_out]
    notes += [
        f"{name}={inherited[name]} gives way to the launcher's {found[name]}"
        for name in _OURS
        if name in found and inherited.get(name, found[name]) != found[name]
    ]
    return found | dict.fromkeys(left_out), notes


def _of_libraries(inherited: Mapping[str, str], preload: Preload) -> dict[str, str]:
    found: dict[str, str] = {}
    if preload.paths:
        before = [path for path in inherited.get("LD_PRELOAD", "").replace(":", " ").split() if path]
        found["LD_PRELOAD"] = ":".join([*before, *(str(path) for path in preload.paths)])
    if preload.openmp is not None:
        found["KMP_BLOCKTIME"] = inherited.get("KMP_BLOCKTIME", "1")
    return found
