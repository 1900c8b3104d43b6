"""Ranks that mpirun has bound to fewer cores than they should use: Open MPI binds each rank to one core by default."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from whet import system
from whet.config.ranks import Place
from whet.console import plural
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.launch.picture import ranges

_BINDS = ("Open MPI", "Intel MPI or MPICH", "MVAPICH")
"""Launchers that bind ranks, and that say how many ranks a machine has."""
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Variables of schedulers, which may have given other cores of the machine to other users."""
_THREADS = "OMP_NUM_THREADS"


def widened(place: Place, environment: MutableMapping[str, str]) -> str | None:
    """Bind this rank to its share of the machine if it is bound to less, and return what was done; None if nothing was.

    A rank whose OMP_NUM_THREADS fits on its cores stays where it is. To be called before torch is imported, because its
    threads inherit the binding.
    """
    if place.n_ranks == 1 or place.launcher not in _BINDS or not system.can_bind():
        return None
    before = cpu.usable_cpus()
    n_own, asked = len(topology.read(cpus=before).within(before).cores), environment.get(_THREADS, "")
    n_threads = int(asked) if asked.isdigit() else None
    if n_threads is not None and n_threads <= n_own:
        return None
    share = _share(place)
    if share is None or len(share.cores) < (n_threads or 2 * n_own) or any(environment.get(one) for one in _SCHEDULERS):
        system.bind(before)
        return _too_narrow(place, n_own, n_threads)
    system.bind(share.cpus)
    environment.setdefault(_THREADS, str(share.n_threads))
    now = f"CPUs {ranges(share.cpus)} with {plural(int(environment[_THREADS]), 'thread')}"
    return (
        f"{place.launcher} has bound rank {place.rank} to {plural(n_own, 'core')}; it now runs on {now}. "
        f"{_THREADS}={n_own} keeps the binding"
    )


def _share(place: Place) -> RankPlan | None:
    """Return this rank's part of all cores that the cgroup allows, to which it is bound by this; None if too few."""
    system.bind(range(8 * os.sysconf("SC_NPROCESSORS_CONF")))  # the kernel leaves out what is not allowed
    allowed = cpu.usable_cpus()
    cores = topology.read(cpus=allowed).within(allowed)
    if len(cores.cores) < place.n_local or not 0 <= place.local_rank < place.n_local:
        return None
    return plan_ranks(cores, quota_cores=cpu.quota_cores(), n_ranks=place.n_local)[place.local_rank]


def _too_narrow(place: Place, n_own: int, n_threads: int | None) -> str | None:
    """Return a warning if threads share cores; a rank without a wish for threads takes as many as it has cores."""
    if n_threads is None:
        return None
    return (
        f"rank {place.rank} has {n_threads} threads on {plural(n_own, 'core')}, which take time from each other: "
        f"set {_THREADS} to {n_own}, or have the launcher bind ranks to more cores (Open MPI: --bind-to none)"
    )
