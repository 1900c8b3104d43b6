"""A name that the cluster has already given to another object, as an error with a way that works."""

from __future__ import annotations

from typing import Any

from whet.errors import ConfigError, WhetError
from whet.kubernetes.cluster.client import Cluster
from whet.kubernetes.cluster.failures import ClusterError
from whet.kubernetes.cluster.kinds import ApiKind, job_kind_of


def name_is_taken(cluster: Cluster, kind: ApiKind, one: dict[str, Any], message: str, *, ours: bool) -> WhetError:
    """Return the error for a name that this object has: being deleted, made by whet for this job (`ours`), or not."""
    name = one["metadata"]["name"]
    there = f"{kind.kind} {name} in namespace {cluster.namespace}"
    if one["metadata"].get("deletionTimestamp"):
        return _being_deleted(there, message, kind, cluster)
    delete = f"whet k8s delete {cluster.options(name, job_kind_of(kind))}"
    return ConfigError(
        what=f"there is a {there} already (409)",
        got=message,
        why="a job cannot be changed once it exists" if ours else "whet did not create it, and leaves it alone",
        fix=f"delete it, run: {delete}; or use another --name; the new job resumes from the old one's checkpoints if "
        "--output_dir is the same"
        if ours
        else "use another --name",
    )


def _being_deleted(there: str, message: str, kind: ApiKind, cluster: Cluster) -> ClusterError:
    resource = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
    return ClusterError(
        what=f"the {there} is still being deleted (409)",
        got=message,
        why="its pods finish their step and save a checkpoint first, for up to --grace_period_s",
        fix=f"submit again when it is gone; to see that, run: kubectl get {resource} -n {cluster.namespace}"
        f"{cluster.access}; or use another --name and --output_dir",
    )
