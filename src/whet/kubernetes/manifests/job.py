"""An Indexed Job of Kubernetes itself, with a headless Service by which its pods find each other."""

from __future__ import annotations

from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA
from whet.kubernetes.manifests.pod import Manifest, job_metadata, metadata, pod_template, process
from whet.kubernetes.plan import PORT, JobPlan

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOIN_S = 900
"""Seconds that a pod waits for the others: a node may have to be started, and to pull the image."""


def job(plan: JobPlan) -> list[Manifest]:
    """Return the Job, after the Service that gives its pods names if there are several."""
    own: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata(plan),
        "spec": {
            "completions": plan.nodes,
            "parallelism": plan.nodes,
            "completionMode": "Indexed",
            "backoffLimit": plan.n_failures,
            "podFailurePolicy": failure_policy("whet"),
            "template": pod_template(plan, process(plan, _variables(plan))),
        },
    }
    if plan.nodes == 1:
        return [own]
    own["spec"]["template"]["spec"]["subdomain"] = plan.name
    return [_service(plan), own]


def failure_policy(container: str) -> Manifest:
    """Return which failures of a pod count: not an eviction; and which end the job, as another start would fail too."""
    hopeless = {"containerName": container, "operator": "In", "values": [EXIT_BAD_DATA, EXIT_BAD_CONFIG]}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": hopeless},
        ]
    }


def _service(plan: JobPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": plan.name},
            "ports": [{"name": "rendezvous", "port": PORT, "targetPort": PORT}],
        },
    }


def _variables(plan: JobPlan) -> list[Manifest]:
    """Return torchrun's variables; its pods are ranked by their completion index."""
    if not plan.has_peers:
        return []
    first = f"{plan.name}-0.{plan.name}" if plan.nodes > 1 else "127.0.0.1"
    values = {"PET_NNODES": str(plan.nodes)}
    if plan.rdzv_backend == "c10d":
        values |= {
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": plan.name,
            "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
            "PET_RDZV_CONF": f"join_timeout={_JOIN_S},read_timeout={_JOIN_S}",
        }
    else:
        values |= {"PET_MASTER_ADDR": first, "PET_MASTER_PORT": str(PORT)}
    found: list[Manifest] = [{"name": name, "value": value} for name, value in values.items()]
    return [*found, {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}]
