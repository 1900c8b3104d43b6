"""What status and logs say about pods that crash again and again, or that the cluster ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from api_server import Cluster
from plans import words

from whet.cli.main import run

pytest.importorskip("kubernetes")
KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}}


@pytest.fixture
def pod_status(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the status of the only pod of a job, to be changed."""
    assert run(words(action="submit", kind="pytorchjob")) == 0
    capfd.readouterr()
    return cluster.of("pods")[0]["status"]


def asked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert run(["k8s", *words, "--name", "squad", "--kind", "pytorchjob"]) == 0
    printed = capfd.readouterr()
    return printed.out, " ".join(printed.err.split())


def crash(status: dict[str, Any], last: dict[str, Any], restarts: int = 4) -> None:
    status["containerStatuses"][0] |= {"state": BACK_OFF, "lastState": last, "restartCount": restarts}


def test_status_names_the_cause_of_a_crash_loop(pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    crash(pod_status, KILLED)
    out, _ = asked(capfd, "status")
    assert "CrashLoopBackOff" in out
    assert "ended before with OOMKilled, exit code 137; the pod needs more --memory" in out
    assert "last line of pod 0: step 2 of pod 0" in out


def test_logs_show_what_a_crash_loop_printed_and_why_it_waits(
    pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    crash(pod_status, {"terminated": {"reason": "Error", "exitCode": 78}})
    out, err = asked(capfd, "logs", "--no_follow")
    assert out.splitlines() == [f"step {step} of pod 0" for step in range(3)]
    assert "CrashLoopBackOff: ended before with Error, exit code 78" in err


def test_logs_are_asked_for_if_only_the_count_of_restarts_is_known(
    pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    crash(pod_status, {}, restarts=1)
    assert "step 2 of pod 0" in asked(capfd, "logs", "--no_follow")[0]


def test_status_says_how_a_running_pod_ended_before(
    pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    pod_status["containerStatuses"][0] |= {"lastState": KILLED, "restartCount": 1}
    assert "Running" in (out := asked(capfd, "status")[0])
    assert "1 restarts, node-0: ended before with OOMKilled" in out


ENDED: dict[str, tuple[dict[str, Any], str]] = {
    "by the kubelet": ({"reason": "Evicted", "message": "The node was low on resource: memory"}, "low on resource"),
    "with its node": ({"reason": "NodeLost", "message": "Node node-0 is unresponsive"}, "unresponsive"),
    "by a drain": (
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                         "message": "Eviction API: evicting"}]},
        "EvictionByEvictionAPI",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDED)
def test_status_says_that_the_cluster_ended_a_pod(
    case: str, pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its container was killed, too, and that is not the cause."""
    status, said = ENDED[case]
    pod_status["containerStatuses"][0]["state"] = {"terminated": {"reason": "Error", "exitCode": 137}}
    pod_status |= {"phase": "Failed", **status}
    out, _ = asked(capfd, "status")
    assert said in out
    assert "exit code 137" not in out


@pytest.fixture
def job_ends(cluster: Cluster, pod_status: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends after a second, in which following asks often."""
    monkeypatch.setattr("whet.kubernetes.cluster.logs._EVERY_S", 0.1)
    threading.Timer(1.0, cluster.finish, ("pytorchjobs", "squad", "Succeeded")).start()


BLIPS = {
    "too many requests": [(429, "slow down")],
    "no answer of the kubelet": [(500, "dial tcp: i/o timeout"), (502, "bad gateway"), (503, "unavailable")],
    "a broken connection": [(0, "")] * 5,
    "a pod that was deleted": [(404, 'pods "squad-worker-0" not found')],
    "a container that is about to start": [(400, 'container "pytorch" is waiting to start: PodInitializing')],
}


@pytest.mark.usefixtures("job_ends")
@pytest.mark.parametrize("case", BLIPS)
def test_following_survives_what_passes(case: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.log_answers += BLIPS[case]
    out, err = asked_within(cluster, capfd)
    assert out.splitlines() == [f"step {step} of pod 0" for step in range(3)]
    assert err.count("trying again") <= 1


def asked_within(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    found = asked(capfd, "logs")
    assert cluster.log_answers == []
    return found


@pytest.mark.usefixtures("job_ends")
def test_following_reads_only_the_new_part_of_a_log_again(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    asked_within(cluster, capfd)
    first, *later = cluster.log_queries
    assert "sinceSeconds" not in first
    assert later
    assert all(60 <= int(query["sinceSeconds"]) <= 65 for query in later)


def test_following_ends_if_the_cluster_stays_away(
    cluster: Cluster, pod_status: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.kubernetes.cluster.logs._EVERY_S", 0.1)
    monkeypatch.setattr("whet.kubernetes.cluster.logs._PATIENCE_S", 0.5)
    threading.Timer(0.5, cluster.answers.update, ({("GET", "pytorchjobs"): (503, "down for good")},)).start()
    assert run(["k8s", "logs", "squad", "--kind", "pytorchjob"]) == 74
    err = capfd.readouterr().err
    assert "down for good" in err
    assert err.count("trying again") == 1
