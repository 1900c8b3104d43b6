"""`whet k8s logs`: the output of a pod, and of those that follow it after an eviction or a restart."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from whet.errors import EXIT_OK, EXIT_OTHER, StorageError, WhetError, escape_controls
from whet.kubernetes.cluster import objects
from whet.kubernetes.cluster.client import FOLLOWING, TIMEOUT, Cluster
from whet.kubernetes.cluster.failures import ClusterError, explained
from whet.kubernetes.cluster.kinds import OF_JOB, POD
from whet.kubernetes.cluster.pods import Pod, condition, has_ended, has_started, is_waiting, number_of, pods_of
from whet.kubernetes.cluster.state import state_of
from whet.kubernetes.fields import KubernetesFields

_EVERY_S = 2.0
_PATIENCE_S = 600.0
"""Seconds for which following bears a cluster that does not answer: an upgrade of its control plane takes minutes."""
_MARGIN_S = 60
"""Seconds of the log that are read again, so that no line is lost; those that were shown are left out."""


def last_line(cluster: Cluster, pod: str) -> str:
    """Return the last line that the pod has printed."""
    with explained("get the log of", cluster, POD, pod):
        text = cluster.core.read_namespaced_pod_log(pod, cluster.namespace, tail_lines=3, _request_timeout=TIMEOUT)
    lines = [line for line in str(text).splitlines() if line.strip()]
    return escape_controls(lines[-1].rpartition("\r")[2]) if lines else ""


def print_logs(cluster: Cluster, asked: KubernetesFields) -> int:
    """Print the log of a pod; following, until the job ends. Return 1 if it failed, else 0."""
    shown, said, patience = _Shown(cluster, asked.tail), "", _Patience()
    while True:
        try:
            job = objects.read(cluster, OF_JOB[asked.kind][-1], asked.name)
            patience.begin()
            pod = next((one for one in pods_of(cluster, asked.name) if number_of(one) == asked.node_rank), None)
            if pod is not None and has_started(pod):
                shown.print_new(pod, follow=asked.follow)
        except (ClusterError, StorageError) as error:
            if not asked.follow:
                raise
            patience.wait_after(error)
            continue
        patience.renew()
        state = state_of(job)
        ended = state.startswith(("succeeded", "failed"))
        if ended and (pod is None or has_ended(pod)):
            break
        said = _say_waiting(pod, asked, said)
        if not asked.follow:
            break
        time.sleep(_EVERY_S)
    if ended or not shown.name:
        print(f"whet: {asked.kind} {asked.name}: {state}", file=sys.stderr)
    return EXIT_OTHER if state.startswith("failed") else EXIT_OK


class _Patience:
    """Bears that a cluster which has answered before does not answer for a while."""

    def __init__(self) -> None:
        self.since: float | None = None
        """When the cluster last answered all questions of a round, or its first one; None if it never did."""
        self.quiet = False

    def begin(self) -> None:
        """Note that the cluster can be reached."""
        if self.since is None:
            self.renew()

    def renew(self) -> None:
        """Note an answer."""
        self.since, self.quiet = time.monotonic(), False

    def wait_after(self, error: WhetError) -> None:
        """Wait before the next attempt, saying once why; raises the error if there was no answer for too long."""
        if self.since is None or time.monotonic() - self.since > _PATIENCE_S:
            raise error
        if not self.quiet:
            print(f"whet: {error.problems[0].what}; trying again", file=sys.stderr, flush=True)
        self.quiet = True
        time.sleep(_EVERY_S)


class _Shown:
    """What has been printed, so that a stream which breaks continues where it was."""

    def __init__(self, cluster: Cluster, tail: int | None) -> None:
        self.cluster, self.tail, self.name, self.stamp = cluster, tail, "", ""
        self.received = 0.0
        """When the last line came, by the clock."""

    def print_new(self, pod: Pod, *, follow: bool) -> None:
        """Print the lines of the pod that have not been printed."""
        name = pod["metadata"]["name"]
        if name != self.name:
            if self.name:
                print(f"whet: {self.name} has ended, {name} continues", file=sys.stderr, flush=True)
                self.tail = None
            self.name, self.stamp = name, ""
        for line in self._lines(follow):
            stamp, _, text = line.partition(" ")
            if stamp > self.stamp:
                self.stamp, self.received = stamp, time.time()
                print(escape_controls(text, keep="\t"), flush=True)

    def _lines(self, follow: bool) -> Iterator[str]:
        with explained("get the log of", self.cluster, POD, self.name):
            try:
                answer = self.cluster.core.read_namespaced_pod_log(
                    self.name, self.cluster.namespace, follow=follow, timestamps=True, _preload_content=False,
                    _request_timeout=FOLLOWING, **self._part(),
                )  # fmt: skip
            except self.cluster.refusal as error:
                if follow and _has_no_log(error):
                    return  # the pod was deleted, or its container is about to start: the next round sees what is there
                raise
        try:
            yield from (line.decode("utf-8", "replace").rstrip("\n") for line in answer)
        except (self.cluster.interruption, OSError):
            return  # a connection ends before its pod does: the next one continues
        finally:
            answer.release_conn()

    def _part(self) -> dict[str, int]:
        """Return which part of the log is asked for; once lines were shown, what came since, with a margin."""
        if self.stamp:
            return {"since_seconds": max(0, int(time.time() - self.received)) + _MARGIN_S}
        return {} if self.tail is None else {"tail_lines": self.tail}


def _has_no_log(error: Any) -> bool:
    return error.status == 404 or (error.status == 400 and "waiting to start" in str(error.body))


def _say_waiting(pod: Pod | None, asked: KubernetesFields, said: str) -> str:
    """Say once why there is nothing to show."""
    if pod is not None and not is_waiting(pod):
        return ""
    word, message = ("not made", "") if pod is None else condition(pod)
    text = f"whet: waiting for pod {asked.node_rank}: {word}{f': {message}' if message else ''}"
    if text != said:
        print(text, file=sys.stderr, flush=True)
    return text
