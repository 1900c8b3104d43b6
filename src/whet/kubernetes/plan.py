"""The plan of a job: what every kind of manifest is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.kubernetes.arguments import read_quantity, secret_reference
from whet.kubernetes.command import CACHE, TEMPORARY, OwnCommands, program
from whet.kubernetes.fields import Kind, KubernetesFields

PORT = 29500
"""The port at which ranks find each other."""
_KEPT_FREE_FROM = 8
"""Threads of a rank from which one of them is left for communication, as in `whet launch`."""
_TO_END_S = 10
"""Seconds of the grace period that are left after the ranks' own end, for the launcher and the kubelet."""


@dataclass(frozen=True)
class SecretReference:
    """A variable whose value is in a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class JobPlan:
    """What is to run where: the answers that all manifests share."""

    asked: KubernetesFields
    name: str
    kind: Kind
    image: str
    nodes: int
    n_threads: int
    """Computing threads of each rank."""
    cpus: int
    memory: str
    command: tuple[str, ...]
    """What a pod starts."""
    variables: Mapping[str, str]
    secrets: tuple[SecretReference, ...]
    elastic: tuple[int, int]
    """The fewest and the most pods; both are `nodes` for a job of a fixed size."""
    rdzv_backend: str
    notes: tuple[str, ...]
    """What could not be checked on this machine, a line each."""

    @property
    def n_ranks(self) -> int:
        """Ranks of the job with `nodes` pods."""
        return self.nodes * self.asked.nproc_per_node

    @property
    def has_peers(self) -> bool:
        """Whether there can be more than one rank."""
        return self.elastic[1] * self.asked.nproc_per_node > 1

    @property
    def n_failures(self) -> int:
        """Pod failures that the job survives: in each of its restarts all pods fail together."""
        return self.asked.max_restarts * self.elastic[1]


def build_plan(asked: KubernetesFields, own: OwnCommands) -> JobPlan:
    """Return the plan for checked options; raises ConfigError if the command cannot run in the pods."""
    assert asked.image is not None and asked.memory is not None  # noqa: PT018  the rules demand both
    cpus = int(read_quantity(asked.cpus or "") or 0)
    elastic = (asked.min_nodes or asked.nodes, asked.max_nodes or asked.nodes)
    has_peers = elastic[1] * asked.nproc_per_node > 1
    n_threads = threads(asked, cpus, alone=not has_peers)
    runs = program(asked, own)
    references = [reference for pair in asked.env_from_secret if (reference := secret_reference(pair))]
    return JobPlan(
        asked=asked,
        name=asked.name,
        kind=asked.kind,
        image=asked.image,
        nodes=asked.nodes,
        n_threads=n_threads,
        cpus=cpus,
        memory=asked.memory,
        command=_started(asked, runs.words, has_peers=has_peers),
        variables=_variables(asked, n_threads, has_peers=has_peers),
        secrets=tuple(SecretReference(*reference) for reference in references),
        elastic=elastic,
        rdzv_backend=asked.rdzv_backend or ("c10d" if asked.kind == "pytorchjob" else "static"),
        notes=runs.notes,
    )


def threads(asked: KubernetesFields, cpus: int, *, alone: bool) -> int:
    """Return the computing threads of each rank: its cores, less those that are kept free."""
    cores = cpus // asked.cpus_per_core // asked.nproc_per_node
    usual = int(not alone and cores >= _KEPT_FREE_FROM)
    kept_free = usual if asked.kept_free_cores is None else asked.kept_free_cores
    return cores - min(kept_free, cores - 1)


def _started(asked: KubernetesFields, words: tuple[str, ...], *, has_peers: bool) -> tuple[str, ...]:
    """Return the words of a pod's process: torchrun for several ranks, which finds the others by its PET_ variables.

    torchrun does not restart its ranks itself if the rendezvous is static: its store keeps the addresses of the
    attempt before, and the agents do not learn that another pod is new.
    """
    if not has_peers:
        return ("python", *words)
    restarts = asked.max_restarts if asked.kind == "pytorchjob" or asked.rdzv_backend == "c10d" else 0
    return (
        "torchrun",
        f"--nproc_per_node={asked.nproc_per_node}",
        f"--max_restarts={restarts}",
        *words,
    )


def _variables(asked: KubernetesFields, n_threads: int, *, has_peers: bool) -> dict[str, str]:
    """Return the variables of the processes; the user's are the last."""
    found = {
        "OMP_NUM_THREADS": str(n_threads),
        "HF_HOME": f"{CACHE}/huggingface",
        "XDG_CACHE_HOME": CACHE,
        "HOME": TEMPORARY,
        "TMPDIR": TEMPORARY,
        "PYTHONUNBUFFERED": "1",
    }
    if has_peers:
        found["GLOO_SOCKET_IFNAME"] = asked.network_interface
        found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(asked.grace_period_s - _TO_END_S)  # else 30 s, then SIGKILL
    return found | dict(pair.split("=", 1) for pair in asked.env)
