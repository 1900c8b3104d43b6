"""Threads and cores of a Ray Train worker.

Ray sets OMP_NUM_THREADS to the CPUs that it assigns to a process, which is 1 unless `resources_per_worker` says more,
and binds no process to cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from whet import system
from whet.config.ranks import Place
from whet.console import plural
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Assigned:
    """CPUs as Ray counts them."""

    worker: float
    """Assigned to this worker."""
    node: float
    """Of the node that it runs on; fewer than the node has if the user limited Ray."""
    elsewhere: float
    """Assigned to other work than this training, anywhere in the cluster."""


def use_cores(place: Place, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Give this Ray Train worker its share of the node's cores, and return what was done; None if nothing was.

    A worker with several CPUs, or with an OMP_NUM_THREADS of the user's own, keeps that number of threads.
    """
    assigned = _assigned(place)
    if assigned is None or not system.can_bind() or environment.get(_THREADS) != str(max(int(assigned.worker), 1)):
        return None
    if assigned.elsewhere > 0:
        return _shared(place, assigned)
    share = _share(place, assigned)
    if share is None:
        return None
    n_threads = share.n_threads if assigned.worker <= 1 else min(int(assigned.worker), share.n_threads)
    system.bind(share.cpus)
    torch.set_num_threads(n_threads)
    environment[_THREADS] = str(n_threads)
    return (
        f"Ray assigned {assigned.worker:g} CPUs to rank {place.rank}, and other work has none: it runs on CPUs "
        f"{', '.join(map(str, share.cpus))} with {plural(n_threads, 'thread')}"
    )


def _assigned(place: Place) -> Assigned | None:
    """Return the CPUs of this worker; None outside of a Ray Train worker, or if it has none."""
    ray = sys.modules.get("ray")
    if ray is None or "ray.train" not in sys.modules or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    own = _cpus(context.get_assigned_resources()) if context.worker.mode == ray.WORKER_MODE else 0.0
    if own <= 0:
        return None
    node = next((one for one in ray.nodes() if one["NodeID"] == context.get_node_id()), {"Resources": {}})
    in_use = _cpus(ray.cluster_resources()) - _cpus(ray.available_resources())
    return Assigned(own, _cpus(node["Resources"]), max(in_use - own * place.n_ranks, 0.0))


def _cpus(resources: Any) -> float:
    return float(resources.get("CPU", 0.0))


def _shared(place: Place, assigned: Assigned) -> str:
    return (
        f"Ray assigned {assigned.worker:g} CPUs to rank {place.rank} and {assigned.elsewhere:g} to other work: it "
        f"keeps {plural(max(int(assigned.worker), 1), 'thread')}; resources_per_worker={{'CPU': N}} in ScalingConfig "
        "gives it N"
    )


def _share(place: Place, assigned: Assigned) -> RankPlan | None:
    """Return this worker's part of the cores that Ray may use on its node; None if there are too few for all."""
    allowed = cpu.usable_cpus()
    cores = topology.read(cpus=allowed).within(allowed)
    limits = [cpu.quota_cores(), assigned.node if assigned.node < len(allowed) else None]
    quota = min((limit for limit in limits if limit is not None), default=None)
    n_usable = len(cores.cores) if quota is None else min(len(cores.cores), int(quota))
    if n_usable < place.n_local:
        return None
    return plan_ranks(cores, quota_cores=quota, n_ranks=place.n_local)[place.local_rank]
