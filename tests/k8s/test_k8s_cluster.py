"""Submit, status, logs and delete through the real Python client and a real kubectl, against a server of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from api_server import Cluster, pod, set_state
from kubeconfigs import kubeconfig
from plans import BASE, pod_of, words

from following import followed, ways
from whet.cli.main import run

pytest.importorskip("kubernetes")
PLURALS = {"trainjob": ("trainingruntimes", "trainjobs"), "pytorchjob": ("pytorchjobs",), "job": ("services", "jobs")}
kinds = pytest.mark.parametrize("kind", PLURALS)


def submitted(capfd: pytest.CaptureFixture[str], **options: Any) -> str:
    assert run(words(action="submit", **options)) == 0
    return capfd.readouterr().out


def answered(
    capfd: pytest.CaptureFixture[str], action: str, *more: str, kind: str = "trainjob"
) -> tuple[int, str, str]:
    code = run(["k8s", action, "--name", "squad", "--kind", kind, *more])
    printed = capfd.readouterr()
    return code, printed.out, " ".join(printed.err.split())


def names(cluster: Cluster) -> set[tuple[str, str]]:
    return {(plural, name) for plural, _, name in cluster.objects if plural not in ("pods", "persistentvolumeclaims")}


@kinds
def test_a_job_is_submitted_and_deleted(kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    out = submitted(capfd, kind=kind, nodes=2)
    assert names(cluster) == {(plural, "squad") for plural in PLURALS[kind]}
    assert f"whet k8s logs --name squad --kind {kind} --namespace ml" in out
    code, out, _ = answered(capfd, "delete", kind=kind)
    assert (code, names(cluster)) == (0, set())
    assert out.count("deleted") == len(PLURALS[kind])
    assert {key for key in cluster.objects if key[0] == "persistentvolumeclaims"} == {
        ("persistentvolumeclaims", "ml", name) for name in ("runs", "single", "frozen")
    }  # fmt: skip


@kinds
def test_status_shows_pods_restarts_and_the_last_line(
    kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    submitted(capfd, kind=kind, nodes=2)
    set_state(cluster.of("pods")[1], {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, "Running", 4)
    code, out, _ = answered(capfd, "status", kind=kind)
    lines = out.splitlines()
    assert code == 0
    assert "in namespace ml: not finished" in lines[0]
    assert "Running" in lines[1]
    assert "0 restarts, node-0" in lines[1]
    assert "CrashLoopBackOff" in lines[2]
    assert "4 restarts, node-1: back-off" in lines[2]
    assert lines[3] == "last line of pod 0: step 2 of pod 0"


CONDITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no room": (
        {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "4 Insufficient cpu"}]},
        "4 Insufficient cpu; no node has room for the pod",
    ),
    "no memory": ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "needs more --memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONDITIONS)
def test_status_says_why_a_pod_does_not_run(case: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(capfd)
    state, said = CONDITIONS[case]
    (one,) = cluster.of("pods")
    if "phase" in state:
        one["status"] = state
    else:
        set_state(one, state, "Pending" if "waiting" in state else "Failed")
    assert said in answered(capfd, "status")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("condition", "code"), [("Complete", 0), ("Failed", 1)])
def test_logs_follow_rank_0_to_the_end(
    condition: str, code: int, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    submitted(capfd, nodes=2)
    threading.Timer(0.3, cluster.finish, ("trainjobs", "squad", condition, "so it is")).start()
    found, out, err = answered(capfd, "logs")
    assert out.splitlines() == [f"step {step} of pod 0" for step in range(3)]
    assert found == code
    assert "so it is" in err


@pytest.mark.slow
def test_logs_continue_with_the_pod_that_replaces_an_evicted_one(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    submitted(capfd, kind="job")
    (first,) = cluster.of("pods")
    job = cluster.of("jobs")[0]

    def evict() -> None:
        set_state(first, {"terminated": {"exitCode": 75, "reason": "Error"}}, "Failed")
        next_one = pod("squad-0-again", 0, job["spec"]["template"], {"running": {}})
        cluster.logs["squad-0-again"] = ["resumed at step 3"]
        cluster.add("pods", next_one)
        time.sleep(2.5)
        cluster.finish("jobs", "squad")

    threading.Timer(0.3, evict).start()
    code, out, err = answered(capfd, "logs", kind="job")
    assert (code, out.splitlines()[-1]) == (0, "resumed at step 3")
    assert out.count("step 0 of pod 0") == 1
    assert "squad-0 has ended, squad-0-again continues" in err


def test_a_job_that_is_there_is_not_touched(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(capfd)
    assert run(words(action="submit")) == 78
    assert "run: whet k8s delete --name squad" in capfd.readouterr().err
    assert names(cluster) == {("trainingruntimes", "squad"), ("trainjobs", "squad")}


@kinds
def test_printed_commands_name_the_kind_and_the_cluster(
    kind: str, cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They work as printed: in another shell, on a cluster that is not the usual one."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    access = {"context": "good", "kubeconfig": str(tmp_path / "config")}
    where = f"--name squad --kind {kind} --namespace ml --context good --kubeconfig {tmp_path / 'config'}"
    assert f"whet k8s logs {where}\n" in submitted(capfd, kind=kind, **access)
    assert run(words(action="submit", kind=kind, **access)) == 78
    found = " ".join(capfd.readouterr().err.split())
    assert f"run: whet k8s delete {where}; or use another --name" in found
    assert run(["k8s", "delete", *where.split()]) == 0
    assert names(cluster) == set()


def test_a_job_that_is_being_deleted_is_waited_for(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(capfd)
    for plural in PLURALS["trainjob"]:
        cluster.of(plural)[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert run(words(action="submit")) == 74
    said = " ".join(capfd.readouterr().err.split())
    assert "still being deleted" in said
    assert "submit again when it is gone" in said
    assert "whet k8s delete" not in said


def test_a_name_that_another_program_uses_is_not_to_be_deleted(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    web = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "squad"}, "spec": {"clusterIP": "None"}}
    cluster.add("services", web)
    assert run(words(action="submit", kind="job", nodes=2)) == 78
    said = " ".join(capfd.readouterr().err.split())
    assert "use another --name" in said
    assert "whet k8s delete" not in said


def test_nothing_is_left_of_a_job_that_is_refused(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.answers[("POST", "trainjobs")] = (422, "TrainJob squad is invalid: spec.trainer: too large")
    assert run(words(action="submit")) == 78
    assert "too large" in capfd.readouterr().err
    assert names(cluster) == set()


REFUSALS: dict[str, tuple[int, str, int, str]] = {
    "invalid": (422, "spec.mlPolicy: Invalid value", 78, "whet k8s render with the same options"),
    "busy": (429, "too many requests", 74, "try again"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_its_reason_and_a_way(case: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    status, message, code, fix = REFUSALS[case]
    cluster.answers[("POST", "trainingruntimes")] = (status, message)
    assert run(words(action="submit")) == code
    said = " ".join(capfd.readouterr().err.split())
    assert message in said
    assert fix in said


@pytest.mark.parametrize(("kind", "group"), [("trainjob", "trainer.kubeflow.org"), ("pytorchjob", "kubeflow.org")])
def test_a_cluster_without_the_operator_is_named(
    kind: str, group: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.missing.add(group)
    assert run(words(action="submit", kind=kind)) == 78
    said = " ".join(capfd.readouterr().err.split())
    assert "does not know the kind" in said
    assert "use --kind job" in said
    assert answered(capfd, "status", kind=kind)[0] == 78


def test_a_job_that_is_not_there(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    for action in ("status", "logs", "delete"):
        code, _, err = answered(capfd, action)
        assert code == 78, action
        assert "squad in namespace ml" in err


def test_a_claim_that_is_missing_or_too_narrow(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words(action="submit", output_claim="nowhere")) == 78
    said = " ".join(capfd.readouterr().err.split())
    assert "there is no claim nowhere in namespace ml" in said
    assert "kubectl get pvc -n ml" in said
    assert "--output_claim, --data_claim or --cache_claim" in said
    assert run(words(action="submit", output_claim="single", nodes=2)) == 78
    assert "ReadWriteMany" in capfd.readouterr().err
    assert names(cluster) == set()
    assert run(words(action="submit", data_claim="single", nodes=2)) == 78
    assert "ReadWriteMany or ReadOnlyMany" in capfd.readouterr().err
    assert run(words(action="submit", output_claim="frozen")) == 78
    assert "cannot be written to" in capfd.readouterr().err
    submitted(capfd, output_claim="single", data_claim="single")
    submitted(capfd, name="other", nodes=2, data_claim="frozen")


def test_an_elastic_job_on_a_claim_of_one_node_has_a_way(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    elastic = words(action="submit", kind="pytorchjob", output_claim="single", nodes=2, min_nodes=1, max_nodes=4)
    assert run(elastic) == 78
    _, _, fix = " ".join(capfd.readouterr().err.split()).partition("fix: ")
    (one_pod,) = [way for way in ways(fix) if "--nodes" in way]
    assert run(followed(elastic, one_pod)) == 0
    assert names(cluster) == {("pytorchjobs", "squad")}


@pytest.mark.parametrize("text", [None, "not: [yaml"])
def test_a_kubeconfig_that_leads_nowhere(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text, "utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = answered(capfd, "status", "--kubeconfig", str(file))
    assert code == 78, err
    assert "the kubeconfig leads to no cluster" in err


def test_a_cluster_that_does_not_answer(cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = kubeconfig(tmp_path / "gone", "http://127.0.0.1:9")
    code, _, err = answered(capfd, "status", "--kubeconfig", str(file))
    assert code == 74
    assert "the cluster cannot be reached" in err


kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def ask_kubectl(*words: str, given: str = "") -> str:
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@kubectl
@kinds
def test_kubectl_takes_what_render_prints(kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Created, followed and deleted by kubectl itself, from the text alone."""
    assert run(words(kind=kind, nodes=2)) == 0
    text = capfd.readouterr().out
    created = ask_kubectl("create", "--validate=false", "-f", "-", given=text)
    assert created.count("created") == len(PLURALS[kind])
    assert names(cluster) == {(plural, "squad") for plural in PLURALS[kind]}
    selector = "app.kubernetes.io/instance=squad"
    shown = ask_kubectl("logs", "-f", "-l", selector, "--prefix", "--max-log-requests=8")
    assert {"step 2 of pod 0", "step 2 of pod 1"} <= {line.partition("] ")[2] for line in shown.splitlines()}
    ask_kubectl("delete", "--wait=false", "-f", "-", given=text)
    assert names(cluster) == set()


WORDS = ("3e-5", "1E5", "y", "n", "Y", "0o17", "1_000", "12:30", "0x1F", ".5", "~", "null", "no", "on", "2026-01-01",
         "=", "<<", "- a", "a: b", "#x", "-1", "+.inf", "é", "two\nlines ", " ", "!a", "@b", "True")  # fmt: skip


@kubectl
@kinds
def test_kubectl_reads_words_that_look_like_numbers_as_text(
    kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    env = tuple(f"V{number}={word}" for number, word in enumerate(WORDS))
    assert run(words("train.py", *WORDS, kind=kind, env=env, label=("y=1e5", "n=n"), node_selector="7=0x7")) == 0
    ask_kubectl("create", "--validate=false", "-f", "-", given=capfd.readouterr().out)
    manifests = [cluster.of(plural)[0] for plural in PLURALS[kind] if cluster.of(plural)]
    pod = pod_of(manifests)
    assert pod["containers"][0]["command"][-len(WORDS) :] == list(WORDS)
    assert set(WORDS) <= {one.get("value") for one in pod["containers"][0]["env"]}
    assert pod["nodeSelector"] == {"7": "0x7"}
    assert {"y": "1e5", "n": "n"}.items() <= manifests[-1]["metadata"]["labels"].items()


@kubectl
def test_kubectl_sees_what_submit_creates(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(capfd)
    assert ask_kubectl("get", "trainjobs", "-o", "name").split() == ["trainjob.trainer.kubeflow.org/squad"]


def test_the_plan_of_the_tests_is_complete() -> None:
    assert {"name", "image", "cpus", "memory", "output_claim"} == set(BASE)


_WITHOUT = "import sys; sys.modules['kubernetes'] = None; from whet.cli.main import main; main(sys.argv[1:])"


@pytest.mark.slow
def test_without_the_client_render_works_and_the_others_name_it(tmp_path: Path) -> None:
    def ended(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _WITHOUT, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert ended(*words()).returncode == 0
    refused = ended("k8s", "status", "--name", "squad")
    assert refused.returncode == 78
    assert "run: pip install 'whet-train[kubernetes]'" in refused.stderr
