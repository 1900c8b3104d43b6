"""The variables that a rank is started with besides those of torch's agent: its threads, its libraries."""

from __future__ import annotations

from collections.abc import Mapping

from whet.hardware.rank_plan import RankPlan
from whet.launch.libraries import Preload

_OURS = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
"""Variables that the user may have set, and that the launcher decides."""
_BINDS_THREADS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")
"""Variables that bind threads one by one: they would bind all processes of a rank to the cores of its first."""


def changed(
    inherited: Mapping[str, str], plan: RankPlan, preload: Preload, *, alone: bool, interface: str | None
) -> tuple[dict[str, str | None], list[str]]:
    """Return the variables of a rank that differ from what it inherits, and a note for each that had to give way.

    None: the variable is left out. `interface` is the network interface that leads to the other ranks, if it is known.
    """
    found: dict[str, str | None] = {"OMP_NUM_THREADS": str(plan.n_threads), **_of_libraries(inherited, preload)}
    if not alone:
        found |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
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
