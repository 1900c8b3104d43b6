"""The pods of a job: which is which, and how each is doing."""

from __future__ import annotations

from typing import Any

from whet.kubernetes.cluster.client import TIMEOUT, Cluster
from whet.kubernetes.cluster.failures import explained
from whet.kubernetes.cluster.kinds import POD

Pod = dict[str, Any]
_INDEX = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")
"""Labels and annotations with the number of a pod; the controllers set them."""
_ADVICE = {
    "OOMKilled": "the pod needs more --memory, or a smaller --per_device_train_batch_size",
    "ErrImagePull": "the node cannot pull --image: check its name, and --image_pull_secrets",
    "ImagePullBackOff": "the node cannot pull --image: check its name, and --image_pull_secrets",
    "CreateContainerConfigError": "a Secret of --env_from_secret, or one of its keys, does not exist",
    "Unschedulable": "no node has room for the pod: compare --cpus and --memory with what kubectl describe nodes calls "
    "allocatable, which is less than the node has",
}


def pods_of(cluster: Cluster, name: str) -> list[Pod]:
    """Return the newest pod of each number, in order."""
    with explained("list", cluster, POD, name):
        answer = cluster.core.list_namespaced_pod(
            cluster.namespace,
            label_selector=f"app.kubernetes.io/instance={name},app.kubernetes.io/managed-by=whet",
            _request_timeout=TIMEOUT,
        )
    newest: dict[int, Pod] = {}
    for pod in sorted(cluster.dicts(answer.items), key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        newest[number_of(pod)] = pod
    return [newest[number] for number in sorted(newest)]


def number_of(pod: Pod) -> int:
    """Return the pod's number among those of the job; 0 if the controller has not said."""
    known = {**pod["metadata"].get("annotations", {}), **pod["metadata"].get("labels", {})}
    return next((int(known[name]) for name in _INDEX if name in known), 0)


def restarts(pod: Pod) -> int:
    """Return how often containers of the pod were started again in it."""
    return sum(one.get("restartCount", 0) for one in _containers(pod))


def condition(pod: Pod) -> tuple[str, str]:
    """Return how the pod is doing in a word, and the cluster's message or our advice on it."""
    status = pod.get("status", {})
    found = (_eviction(status) if status.get("phase") == "Failed" else None) or _of_containers(pod)
    if found is not None:
        return found
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            word = one.get("reason") or "Pending"
            return word, _joined(one.get("message"), _ADVICE.get(word))
    return status.get("reason") or status.get("phase", "Unknown"), status.get("message") or _last_end(pod)


def _eviction(status: dict[str, Any]) -> tuple[str, str] | None:
    """Return why the cluster ended the pod; None if its container ended by itself."""
    if status.get("reason"):
        return status["reason"], status.get("message") or ""
    for one in status.get("conditions") or ():
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return one.get("reason") or "Evicted", one.get("message") or ""
    return None


def _of_containers(pod: Pod) -> tuple[str, str] | None:
    """Return what a container waits for, or how it ended; None if all run or have succeeded."""
    for one in _containers(pod):
        state = one.get("state", {})
        waiting, ended = state.get("waiting"), state.get("terminated")
        if waiting and waiting.get("reason"):
            word = waiting["reason"]
            return word, _last_end(pod) or _ADVICE.get(word) or waiting.get("message") or ""
        if ended and ended.get("reason") != "Completed":
            word = ended.get("reason") or "Error"
            return word, _joined(f"exit code {ended.get('exitCode')}", _ADVICE.get(word))
    return None


def _last_end(pod: Pod) -> str:
    """Return how a container ended before it was started again; nothing if that did not happen."""
    for one in _containers(pod):
        ended = one.get("lastState", {}).get("terminated")
        if ended:
            word = ended.get("reason") or "Error"
            return _joined(f"ended before with {word}, exit code {ended.get('exitCode')}", _ADVICE.get(word))
    return ""


def _joined(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)


def has_started(pod: Pod) -> bool:
    """Return whether a container of the pod has run, now or before it was started again, so that it has a log."""
    return any(
        {"running", "terminated"} & one.get("state", {}).keys()
        or "terminated" in one.get("lastState", {})
        or one.get("restartCount", 0) > 0
        for one in _containers(pod)
    )


def is_waiting(pod: Pod) -> bool:
    """Return whether no container of the pod runs, although the pod has not ended."""
    return not has_ended(pod) and not any("running" in one.get("state", {}) for one in _containers(pod))


def has_ended(pod: Pod) -> bool:
    """Return whether the pod will not run again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _containers(pod: Pod) -> list[dict[str, Any]]:
    return pod.get("status", {}).get("containerStatuses") or []
