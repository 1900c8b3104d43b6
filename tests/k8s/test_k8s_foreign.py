"""`whet k8s delete` deletes only what whet created."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import Cluster
from plans import words

from whet.cli.main import run

pytest.importorskip("kubernetes")


def service(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None"},
    }  # fmt: skip


def deleted(capfd: pytest.CaptureFixture[str], kind: str) -> tuple[int, str, str]:
    code = run(["k8s", "delete", "squad", "--kind", kind])
    printed = capfd.readouterr()
    return code, printed.out, " ".join(printed.err.split())


def test_delete_leaves_a_service_of_another_program(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """A job of one pod has no Service, and one of the same name can belong to an application."""
    assert run(words(action="submit", kind="job")) == 0
    cluster.add("services", service("squad", app="web"))
    capfd.readouterr()
    code, out, _ = deleted(capfd, "job")
    assert (code, [one["metadata"]["name"] for one in cluster.of("services")]) == (0, ["squad"])
    assert cluster.of("jobs") == []
    assert out.splitlines()[:2] == ["deleted Job squad", "left alone, as whet did not create it: Service squad"]


LABELS = {
    "no labels": {},
    "another program's": {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "squad"},
    "another job of whet": {"app.kubernetes.io/managed-by": "whet", "app.kubernetes.io/instance": "other"},
}


@pytest.mark.parametrize("case", LABELS)
def test_delete_refuses_objects_that_are_not_of_the_job(
    case: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "squad", "labels": LABELS[case]}}
    cluster.add("jobs", one)
    code, _, err = deleted(capfd, "job")
    assert (code, len(cluster.of("jobs"))) == (78, 1)
    assert "whet did not create Job squad" in err
    assert "nothing was deleted" in err


def test_delete_spares_an_object_that_was_replaced_meanwhile(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is read and then deleted; one that took its name in between has another uid."""
    assert run(words(action="submit", kind="pytorchjob")) == 0
    from whet.kubernetes.cluster import objects

    found = objects.find

    def replaced(*asked: Any) -> dict[str, Any] | None:
        one = found(*asked)
        cluster.of("pytorchjobs")[0]["metadata"]["uid"] = "another"
        return one

    monkeypatch.setattr(objects, "find", replaced)
    assert deleted(capfd, "pytorchjob")[0] == 78
    assert len(cluster.of("pytorchjobs")) == 1


def test_status_shows_no_pods_of_another_program(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """A release of Helm gives its pods the same instance label."""
    assert run(words(action="submit", kind="job")) == 0
    labels = {"app.kubernetes.io/instance": "squad", "app.kubernetes.io/managed-by": "Helm"}
    web = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-1", "labels": labels}, "status": {}}
    cluster.add("pods", {**web, "spec": {"containers": [{"name": "web"}]}})
    capfd.readouterr()
    assert run(["k8s", "status", "squad", "--kind", "job"]) == 0
    out = capfd.readouterr().out
    assert "squad-0" in out
    assert "web-1" not in out
