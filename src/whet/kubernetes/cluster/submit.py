"""`whet k8s submit` and `whet k8s delete`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from whet.errors import ConfigError, WhetError
from whet.kubernetes.cluster import objects
from whet.kubernetes.cluster.client import TIMEOUT, Cluster
from whet.kubernetes.cluster.failures import explained
from whet.kubernetes.cluster.kinds import CLAIM, OF_JOB, ApiKind, kind_of
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.manifests.render import manifests
from whet.kubernetes.plan import JobPlan

_ONE_NODE = ("ReadWriteOnce", "ReadWriteOncePod")


def submit(cluster: Cluster, plan: JobPlan) -> list[str]:
    """Create the job's objects and return their names; if one is refused, those before it are deleted again."""
    _require_claims(cluster, plan)
    created: list[tuple[ApiKind, dict[str, Any]]] = []
    for manifest in manifests(plan):
        try:
            created.append((kind_of(manifest), objects.create(cluster, manifest)))
        except WhetError:
            for kind, one in created:
                with suppress(WhetError):
                    objects.delete(cluster, kind, one)
            raise
    return [f"{kind.kind} {plan.name}" for kind, _ in created]


def delete(cluster: Cluster, asked: KubernetesFields) -> tuple[list[str], list[str]]:
    """Delete the job's objects, the job first. Return their names, and those of objects that are not whet's.

    Raises ConfigError if there was nothing to delete.
    """
    deleted: list[str] = []
    others: list[str] = []
    for kind in reversed(OF_JOB[asked.kind]):
        one = objects.find(cluster, kind, asked.name)
        if one is not None and not objects.is_of_whet(one, asked.name):
            others.append(f"{kind.kind} {asked.name}")
        elif one is not None and objects.delete(cluster, kind, one):
            deleted.append(f"{kind.kind} {asked.name}")
    if not deleted:
        raise _not_of_whet(cluster, asked, others) if others else _nothing_there(cluster, asked)
    return deleted, others


def _not_of_whet(cluster: Cluster, asked: KubernetesFields, others: list[str]) -> ConfigError:
    return ConfigError(
        what=f"whet did not create {', '.join(others)} in namespace {cluster.namespace}",
        got="an object without the labels app.kubernetes.io/managed-by=whet and "
        f"app.kubernetes.io/instance={asked.name}",
        why="whet k8s delete deletes only what whet k8s has made; nothing was deleted",
        fix="use the --name, --namespace and --kind of whet k8s submit; delete other objects with kubectl",
    )


def _nothing_there(cluster: Cluster, asked: KubernetesFields) -> ConfigError:
    return ConfigError(
        what=f"there is no {asked.kind} {asked.name} in namespace {cluster.namespace}",
        got=f"--kind {asked.kind} --name {asked.name}",
        why="none of its objects is there, so that nothing was deleted",
        fix="use the --name, --namespace and --kind of whet k8s submit",
    )


def _require_claims(cluster: Cluster, plan: JobPlan) -> None:
    """Raise ConfigError if a claim is missing, or cannot be mounted as the pods need it."""
    writable = (plan.asked.output_claim, plan.asked.cache_claim)
    for name in dict.fromkeys((*writable, plan.asked.data_claim)):
        if name is not None and (modes := _access_modes(cluster, name)):
            _require_modes(name, modes, n_pods=plan.elastic[1], writes=name in writable)


def _require_modes(name: str, modes: list[str], *, n_pods: int, writes: bool) -> None:
    needed = "ReadWriteMany" if writes else "ReadWriteMany or ReadOnlyMany"
    if n_pods > 1 and set(modes) <= set(_ONE_NODE):
        raise ConfigError(
            what=f"the claim {name} can be mounted on one node only",
            got=f"access modes {', '.join(modes)}, and a job of {n_pods} pods",
            why="pods on other nodes would wait for it forever",
            fix=f"use a claim with the access mode {needed}, or --nodes 1 without --min_nodes and --max_nodes",
        )
    if writes and set(modes) == {"ReadOnlyMany"}:
        raise ConfigError(
            what=f"the claim {name} cannot be written to",
            got="access mode ReadOnlyMany",
            why="the pods write checkpoints to --output_claim, and downloads to --cache_claim",
            fix="use a claim with the access mode ReadWriteMany; --data_claim takes one that can only be read",
        )


def _access_modes(cluster: Cluster, name: str) -> list[str]:
    """Return how a claim can be mounted; nothing if we may not look. Raises ConfigError if there is no such claim."""
    with explained("get", cluster, CLAIM, name):
        try:
            claim = cluster.core.read_namespaced_persistent_volume_claim(
                name, cluster.namespace, _request_timeout=TIMEOUT
            )
        except cluster.refusal as error:
            if getattr(error, "status", None) == 403:
                return []
            raise
    return list(cluster.dicts(claim)["spec"].get("accessModes", ()))
