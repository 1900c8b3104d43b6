"""Objects of a job in the cluster: created, read, deleted."""

from __future__ import annotations

from typing import Any

from whet.kubernetes.cluster.client import TIMEOUT, Cluster
from whet.kubernetes.cluster.failures import answer_of, explained
from whet.kubernetes.cluster.kinds import ApiKind, kind_of
from whet.kubernetes.cluster.taken import name_is_taken
from whet.kubernetes.manifests.pod import Manifest

_MISSING, _CONFLICT = 404, 409


def create(cluster: Cluster, manifest: Manifest) -> dict[str, Any]:
    """Create the object and return it as the cluster holds it; raises WhetError with the cluster's reason."""
    kind, name = kind_of(manifest), manifest["metadata"]["name"]
    with explained("create", cluster, kind, name):
        try:
            return _create(cluster, kind, manifest)
        except cluster.refusal as error:
            there = find(cluster, kind, name) if getattr(error, "status", None) == _CONFLICT else None
            if there is None:
                raise
            ours = is_of_whet(there, name)
            raise name_is_taken(cluster, kind, there, answer_of(error), ours=ours) from error


def _create(cluster: Cluster, kind: ApiKind, manifest: Manifest) -> dict[str, Any]:
    if not kind.group:
        made = cluster.core.create_namespaced_service(cluster.namespace, manifest, _request_timeout=TIMEOUT)
        return cluster.dicts(made)
    return cluster.objects.create_namespaced_custom_object(
        *_place(cluster, kind), body=manifest, _request_timeout=TIMEOUT
    )


def read(cluster: Cluster, kind: ApiKind, name: str) -> dict[str, Any]:
    """Return the object; raises WhetError if there is none."""
    with explained("get", cluster, kind, name):
        return cluster.objects.get_namespaced_custom_object(*_place(cluster, kind), name, _request_timeout=TIMEOUT)


def find(cluster: Cluster, kind: ApiKind, name: str) -> dict[str, Any] | None:
    """Return the object, or None if there is none; raises WhetError if we may not look."""
    with explained("get", cluster, kind, name):
        try:
            if not kind.group:
                found = cluster.core.read_namespaced_service(name, cluster.namespace, _request_timeout=TIMEOUT)
                return cluster.dicts(found)
            return cluster.objects.get_namespaced_custom_object(*_place(cluster, kind), name, _request_timeout=TIMEOUT)
        except cluster.refusal as error:
            if getattr(error, "status", None) == _MISSING:
                return None
            raise


def is_of_whet(one: dict[str, Any], name: str) -> bool:
    """Return whether whet created the object for the job of this name."""
    labels = one["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/managed-by") == "whet" and labels.get("app.kubernetes.io/instance") == name


def delete(cluster: Cluster, kind: ApiKind, one: dict[str, Any]) -> bool:
    """Delete this object and all that it owns; return False if it is gone, also if another one has its name now."""
    name, uid = one["metadata"]["name"], one["metadata"]["uid"]
    options = {"preconditions": {"uid": uid}, "propagationPolicy": "Foreground"}
    with explained("delete", cluster, kind, name):
        try:
            if not kind.group:
                cluster.core.delete_namespaced_service(name, cluster.namespace, body=options, _request_timeout=TIMEOUT)
            else:
                cluster.objects.delete_namespaced_custom_object(
                    *_place(cluster, kind), name, body=options, _request_timeout=TIMEOUT
                )
        except cluster.refusal as error:
            if getattr(error, "status", None) not in (_MISSING, _CONFLICT):
                raise
            return False
    return True


def _place(cluster: Cluster, kind: ApiKind) -> tuple[str, str, str, str]:
    return kind.group, kind.version, cluster.namespace, kind.plural
