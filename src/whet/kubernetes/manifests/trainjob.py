"""A TrainJob of Kubeflow Trainer (v2) with the TrainingRuntime that it refers to."""

from __future__ import annotations

from whet.kubernetes.manifests.job import failure_policy
from whet.kubernetes.manifests.pod import Manifest, job_metadata, metadata, pod_template, process
from whet.kubernetes.plan import JobPlan

API = "trainer.kubeflow.org/v1alpha1"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""The label by which the controller finds the pods that train."""


def trainjob(plan: JobPlan) -> list[Manifest]:
    """Return the runtime, which holds the pod, and the job, which holds what runs in it."""
    return [_runtime(plan), _job(plan)]


def _runtime(plan: JobPlan) -> Manifest:
    """Return the TrainingRuntime. A failure of a pod fails its Job, and the JobSet then starts all pods again."""
    hopeless = {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ranks: Manifest = {
        "name": "node",
        "template": {
            "metadata": {"labels": dict(_STEP)},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": failure_policy("node"),
                "template": pod_template(plan, {}),
            },
        },
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(plan, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": plan.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": plan.asked.max_restarts, "rules": [hopeless]},
                    "replicatedJobs": [ranks],
                }
            },
        },
    }


def _job(plan: JobPlan) -> Manifest:
    """Return the TrainJob. Without numProcPerNode the controller would start as many ranks as a pod has CPUs."""
    runs = process(plan)
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": job_metadata(plan),
        "spec": {
            "runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime", "name": plan.name},
            "trainer": {
                "image": plan.image,
                "command": runs["command"],
                "env": runs["env"],
                "numNodes": plan.nodes,
                "numProcPerNode": plan.asked.nproc_per_node,
                "resourcesPerNode": runs["resources"],
            },
        },
    }
