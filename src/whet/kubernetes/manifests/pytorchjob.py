"""A PyTorchJob of Kubeflow's training operator (v1), of a fixed size or elastic."""

from __future__ import annotations

from whet.kubernetes.manifests.pod import Manifest, job_metadata, pod_template, process
from whet.kubernetes.plan import PORT, JobPlan

_WAIT_S = "900"
"""Seconds that a pod waits for the first one and for the others: a node may have to be started first."""


def pytorchjob(plan: JobPlan) -> list[Manifest]:
    """Return the PyTorchJob. All pods are workers that meet by c10d, of which the first keeps the store.

    With a master, the operator would give the workers an init container with amounts of its own: the pods would not be
    Guaranteed, and a restricted namespace would refuse them.
    """
    run_policy: Manifest = {"backoffLimit": plan.n_failures, "cleanPodPolicy": "None"}
    spec: Manifest = {
        "nprocPerNode": str(plan.asked.nproc_per_node),
        "runPolicy": run_policy,
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": plan.nodes,
                "restartPolicy": "OnFailure",
                "template": pod_template(plan, process(plan), restart_policy=None),
            }
        },
    }
    if plan.has_peers:
        spec["elasticPolicy"] = _elastic(plan)
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": job_metadata(plan), "spec": spec}]


def _elastic(plan: JobPlan) -> Manifest:
    fewest, most = plan.elastic
    waits = {"join_timeout": _WAIT_S, "read_timeout": _WAIT_S}
    return {
        "minReplicas": fewest,
        "maxReplicas": most,
        "maxRestarts": plan.asked.max_restarts,
        "rdzvBackend": "c10d",
        "rdzvId": plan.name,
        "rdzvPort": PORT,
        "rdzvConf": [{"key": key, "value": value} for key, value in waits.items()],
    }
