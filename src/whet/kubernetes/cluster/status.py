"""`whet k8s status`: the job, its pods, and the last line of its log."""

from __future__ import annotations

from typing import Any

from whet.console import duration
from whet.errors import WhetError
from whet.kubernetes.cluster import objects
from whet.kubernetes.cluster.client import Cluster
from whet.kubernetes.cluster.kinds import OF_JOB
from whet.kubernetes.cluster.logs import last_line
from whet.kubernetes.cluster.pods import condition, has_started, number_of, pods_of, restarts
from whet.kubernetes.cluster.state import state_of
from whet.kubernetes.fields import KubernetesFields


def status(cluster: Cluster, asked: KubernetesFields) -> list[str]:
    """Return the lines of the report; raises WhetError if there is no such job."""
    job = objects.read(cluster, OF_JOB[asked.kind][-1], asked.name)
    pods = pods_of(cluster, asked.name)
    lines = [f"{job.get('kind', asked.kind)} {asked.name} in namespace {cluster.namespace}: {state_of(job)}"]
    lines += [_reported(job)] if job.get("status", {}).get("trainerStatus") else []
    rows = [_row(pod) for pod in pods]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines += ["  " + "  ".join(f"{row[n]:<{widths[n]}}" for n in range(4)).rstrip() + row[4] for row in rows]
    if not pods:
        lines.append("  no pods yet: their controller has not made them, or the job is suspended (by a queue, say)")
    first = next((pod for pod in pods if number_of(pod) == 0 and has_started(pod)), None)
    if first is not None and (line := _last(cluster, first)):
        lines.append(f"last line of pod 0: {line}")
    return lines


def _row(pod: dict[str, Any]) -> tuple[str, str, str, str, str]:
    word, message = condition(pod)
    node = pod.get("spec", {}).get("nodeName") or "no node"
    started = f"{restarts(pod)} restarts"
    return (
        f"pod {number_of(pod)}",
        pod["metadata"]["name"],
        word,
        f"{started}, {node}",
        f": {message}" if message else "",
    )


def _reported(job: dict[str, Any]) -> str:
    """Return what the run has posted to the TrainJob."""
    posted = job["status"]["trainerStatus"]
    left = posted.get("estimatedRemainingSeconds")
    parts = [f"{posted['progressPercentage']}% done"] if "progressPercentage" in posted else []
    parts += [f"about {duration(left)} left"] if left is not None else []
    parts += [f"{one['name']} {one['value']}" for one in posted.get("metrics") or ()]
    return "  " + ", ".join(parts)


def _last(cluster: Cluster, pod: dict[str, Any]) -> str:
    try:
        return last_line(cluster, pod["metadata"]["name"])
    except WhetError:  # its node is gone: the rest of the report still counts
        return ""
