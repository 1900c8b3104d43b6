"""The pod of a rank, or of several: container, amounts, volumes, and what it may not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from whet.kubernetes.inputs import DATA
from whet.kubernetes.outputs import CACHE, OUTPUT, TEMPORARY
from whet.kubernetes.plan import PORT, JobPlan

Manifest = dict[str, Any]
_CONTAINER = {"trainjob": "node", "pytorchjob": "pytorch", "job": "whet"}
"""Kind -> the container's name; the controllers of Kubeflow know theirs by it."""
_OF_QUEUES = "kueue.x-k8s.io/"
"""Labels with which Kueue admits a job: a pod that had them too would wait for an admission of its own."""
_PORT_NAME = {"pytorchjob": "pytorchjob-port"}


def labels(plan: JobPlan) -> dict[str, str]:
    """Return the labels of all that belongs to the job."""
    return {
        "app.kubernetes.io/name": "whet",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/managed-by": "whet",
    }


def metadata(plan: JobPlan, more: Mapping[str, str] = MappingProxyType({})) -> Manifest:
    """Return the metadata of an object of the job, with more labels than all have."""
    place = {} if plan.asked.namespace is None else {"namespace": plan.asked.namespace}
    return {"name": plan.name, **place, "labels": labels(plan) | dict(more)}


def job_metadata(plan: JobPlan) -> Manifest:
    """Return the metadata of the job itself, with the user's labels and annotations."""
    return metadata(plan, pairs(plan.asked.label)) | _annotations(plan)


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a dict."""
    return dict(word.split("=", 1) for word in words)


def _annotations(plan: JobPlan) -> Manifest:
    return {"annotations": pairs(plan.asked.annotation)} if plan.asked.annotation else {}


def pod_template(plan: JobPlan, process: Manifest, *, restart_policy: str | None = "Never") -> Manifest:
    """Return the template of the pods, whose container has these fields about its process."""
    own = {name: value for name, value in pairs(plan.asked.label).items() if not name.startswith(_OF_QUEUES)}
    described = {"labels": own | labels(plan), **_annotations(plan)}
    return {"metadata": described, "spec": _pod(plan, process, restart_policy)}


def process(plan: JobPlan, variables: Sequence[Manifest] = ()) -> Manifest:
    """Return what a container runs, and on what; `variables` are those that place a pod among the others."""
    return {
        "command": list(plan.command),
        "env": [*variables_of(plan), *variables],
        "resources": resources(plan),
    }


def resources(plan: JobPlan) -> Manifest:
    """Return equal requests and limits: a pod of the class Guaranteed, which is evicted last."""
    amounts = {"cpu": str(plan.cpus), "memory": plan.memory}
    if plan.asked.ephemeral_storage is not None:
        amounts["ephemeral-storage"] = plan.asked.ephemeral_storage
    return {"requests": dict(amounts), "limits": dict(amounts)}


def variables_of(plan: JobPlan) -> list[Manifest]:
    """Return the variables of the plan, secrets as references."""
    plain: list[Manifest] = [{"name": name, "value": value} for name, value in plan.variables.items()]
    references = [
        {"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for one in plan.secrets
    ]
    return plain + references


def _pod(plan: JobPlan, process: Manifest, restart_policy: str | None) -> Manifest:
    asked, user = plan.asked, plan.asked.run_as_user
    spec: Manifest = {} if restart_policy is None else {"restartPolicy": restart_policy}
    if asked.service_account is not None:
        spec["serviceAccountName"] = asked.service_account
    if asked.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in asked.image_pull_secrets]
    if asked.node_selector:
        spec["nodeSelector"] = pairs(asked.node_selector)
    if asked.toleration:
        spec["tolerations"] = [toleration(word) for word in asked.toleration]
    return spec | {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": asked.grace_period_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, process)],
        "volumes": _volumes(plan),
    }


def toleration(word: str) -> Manifest:
    """Return the toleration of a taint: of any value without a value, of any effect without an effect."""
    taint, _, effect = word.partition(":")
    key, equals, value = taint.partition("=")
    match: Manifest = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **match, **({"effect": effect} if effect else {})}


def _container(plan: JobPlan, process: Manifest) -> Manifest:
    policy = plan.asked.image_pull_policy
    ports = [{"containerPort": PORT, "name": _PORT_NAME.get(plan.kind, "rendezvous")}] if plan.has_peers else []
    return {
        "name": _CONTAINER[plan.kind],
        "image": plan.image,
        **({} if policy is None else {"imagePullPolicy": policy}),
        "workingDir": str(OUTPUT),  # relative paths of a command lead to the claim
        **process,
        **({"ports": ports} if ports else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(plan),
    }


def _volumes(plan: JobPlan) -> list[Manifest]:
    asked = plan.asked
    claims = {"output": asked.output_claim, "data": asked.data_claim, "cache": asked.cache_claim}
    found: list[Manifest] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": asked.shared_memory}},
        {"name": "temporary", "emptyDir": {}},
    ]
    for name, claim in claims.items():
        if claim is not None:
            source: Manifest = {"claimName": claim}
            if name == "data" and claim not in (asked.output_claim, asked.cache_claim):
                source["readOnly"] = True  # drivers attach a ReadOnlyMany volume to several nodes only so
            found.append({"name": name, "persistentVolumeClaim": source})
        elif name == "cache":
            found.append({"name": name, "emptyDir": {}})
    return found


def _mounts(plan: JobPlan) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  the pod's own
        {"name": "temporary", "mountPath": TEMPORARY},
        {"name": "output", "mountPath": str(OUTPUT)},
        {"name": "cache", "mountPath": CACHE},
    ]
    if plan.asked.data_claim is not None:
        found.append({"name": "data", "mountPath": DATA, "readOnly": True})
    return found
