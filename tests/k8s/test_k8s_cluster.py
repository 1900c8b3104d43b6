"""Submit through a real kubectl, and the commands that it prints, against a server of the tests."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_server import Cluster, event
from kubeconfigs import kubeconfig
from plans import BASE, pod_of, words

from following import followed, ways
from whet.cli.main import run

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
PLURALS = {"trainjob": ("trainingruntimes", "trainjobs"), "pytorchjob": ("pytorchjobs",), "job": ("services", "jobs")}
kinds = pytest.mark.parametrize("kind", PLURALS)


def submitted(capfd: pytest.CaptureFixture[str], **options: Any) -> str:
    assert run(words(action="submit", **options)) == 0
    return capfd.readouterr().out


def refused(capfd: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    code = run(words(action="submit", **options))
    return code, " ".join(capfd.readouterr().err.split())


def ask_kubectl(*given: str, text: str = "") -> str:
    done = subprocess.run(["kubectl", *given], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(cluster: Cluster) -> set[tuple[str, str]]:
    others = ("events", "pods", "persistentvolumeclaims")
    return {(plural, name) for plural, _, name in cluster.objects if plural not in others}


@pytest.mark.slow
@kinds
def test_a_job_is_submitted_and_the_printed_commands_follow_and_delete_it(
    kind: str, cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They work as printed: in another shell, on a cluster that is not the usual one."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    access = {"context": "good", "kubeconfig": str(tmp_path / "config"), "namespace": "ml"}
    out = submitted(capfd, kind=kind, nodes=2, **access)
    assert out.count("created ") == len(PLURALS[kind])
    assert names(cluster) == {(plural, "squad") for plural in PLURALS[kind]}
    cluster.add("events", event("squad", "FailedCreate", "exceeded quota: team, requested: cpu=16"))
    printed = [line.partition(":")[2] for line in out.splitlines() if "kubectl" in line]
    see, why, follow, delete = (shlex.split(line)[1:] for line in printed)
    assert {"squad", "pod/"} <= {word for word in ("squad", "pod/") if word in ask_kubectl(*see, "-o", "name")}
    assert "exceeded quota: team" in ask_kubectl(*why, "-o", "json")
    assert ask_kubectl(*follow).splitlines() == [f"step {step} of pod 0" for step in range(3)]
    ask_kubectl(*delete, "--wait=false")
    assert names(cluster) == set()
    assert {name for plural, _, name in cluster.objects if plural == "persistentvolumeclaims"} == {
        "runs", "single", "frozen",
    }  # fmt: skip


def test_each_submitted_job_has_an_id_of_its_own(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """If its command names a checkpoint, what an equal job has saved since then is not its own."""
    ids = []
    for _ in range(2):
        submitted(capfd, kind="job")
        ((key, job),) = [(key, one) for key, one in cluster.objects.items() if key[0] == "jobs"]
        env = job["spec"]["template"]["spec"]["containers"][0]["env"]
        ids += [one["value"] for one in env if one["name"] == "WHET_LAUNCH_ID"]
        del cluster.objects[key]
    assert len(set(ids)) == 2


def test_a_name_that_is_taken_is_left_alone(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(capfd)
    code, said = refused(capfd)
    assert (code, "use another --name" in said) == (78, True)
    assert names(cluster) == {("trainingruntimes", "squad"), ("trainjobs", "squad")}


@pytest.mark.parametrize(("plural", "kind"), [("trainjobs", "trainjob"), ("jobs", "job")])
def test_nothing_is_left_of_a_job_that_is_refused(
    plural: str, kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.answers["POST", plural] = (422, "squad is invalid: spec.trainer: too large")
    code, said = refused(capfd, kind=kind, nodes=2)
    assert (code, "too large" in said) == (78, True)
    assert names(cluster) == set()


@pytest.mark.parametrize(("how", "wanted"), [("no answer", 74), ("interrupt", 130)])
def test_nothing_is_left_of_a_job_whose_creation_does_not_end(
    how: str, wanted: int, cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Service was created, and the cluster does not answer for the Job: no time is left, or the user has none."""
    monkeypatch.setattr("whet.kubernetes.run._LONGEST_S", 5 if how == "no answer" else 60)
    interrupts = partial(os.kill, os.getpid(), signal.SIGINT)
    cluster.hangs["POST", "jobs"] = interrupts if how == "interrupt" else lambda: None
    code, said = refused(capfd, kind="job", nodes=2)
    assert (code, names(cluster)) == (wanted, set()), said
    ours = "app.kubernetes.io/managed-by=whet,app.kubernetes.io/instance=squad"
    assert f"run: kubectl delete job,service -l {ours}" in said
    assert ("POST", "/api/v1/namespaces/ml/services") in cluster.asked


REFUSALS: dict[str, tuple[int, str, int, str]] = {
    "quota": (403, "exceeded quota: team, requested: cpu=16", 78, "the missing right or amount"),
    "invalid": (422, "spec.mlPolicy: Invalid value", 78, "whet k8s render with the same options"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_its_reason_and_a_way(case: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    status, message, wanted, fix = REFUSALS[case]
    cluster.answers["POST", "trainingruntimes"] = (status, message)
    code, said = refused(capfd)
    assert (code, message in said, fix in said) == (wanted, True, True)


@pytest.mark.parametrize(("kind", "group"), [("trainjob", "trainer.kubeflow.org"), ("pytorchjob", "kubeflow.org")])
def test_a_cluster_without_the_operator_is_named(
    kind: str, group: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.missing.add(group)
    code, said = refused(capfd, kind=kind)
    assert (code, "does not know the objects" in said, "use --kind job" in said) == (78, True, True)


@pytest.mark.night
def test_a_claim_that_is_missing_or_too_narrow(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = refused(capfd, output_claim="nowhere", namespace="ml")
    assert (code, "there is no claim nowhere" in said, "kubectl --namespace=ml get pvc" in said) == (78, True, True)
    assert "ReadWriteMany" in refused(capfd, output_claim="single", nodes=2)[1]
    assert "ReadWriteMany or ReadOnlyMany" in refused(capfd, data_claim="single", nodes=2)[1]
    assert "cannot be written to" in refused(capfd, output_claim="frozen")[1]
    assert names(cluster) == set()
    submitted(capfd, output_claim="single", data_claim="single")
    submitted(capfd, name="other", nodes=2, data_claim="frozen")


def test_who_may_not_look_at_claims_may_submit(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.answers["GET", "persistentvolumeclaims"] = (403, "you cannot get claims")
    submitted(capfd)
    assert names(cluster) == {("trainingruntimes", "squad"), ("trainjobs", "squad")}


def test_an_elastic_job_on_a_claim_of_one_node_has_a_way(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    elastic = words(action="submit", kind="pytorchjob", output_claim="single", nodes=2, min_nodes=1, max_nodes=4)
    assert run(elastic) == 78
    _, _, fix = " ".join(capfd.readouterr().err.split()).partition("fix: ")
    (one_pod,) = [way for way in ways(fix) if "--nodes" in way]
    assert run(followed(elastic, one_pod)) == 0
    assert names(cluster) == {("pytorchjobs", "squad")}


@pytest.mark.parametrize("text", [None, "not: [yaml", "apiVersion: v1\nkind: Config\n"])
def test_a_kubeconfig_that_leads_nowhere(text: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text, "utf-8")
    code, said = refused(capfd, kubeconfig=str(file))
    assert code in (74, 78), said
    assert "fix: " in said


def test_a_context_that_is_not_there(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = refused(capfd, context="elsewhere")
    assert (code, "elsewhere" in said) == (78, True)


def test_a_cluster_that_does_not_answer(cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = refused(capfd, kubeconfig=str(kubeconfig(tmp_path / "gone", "http://127.0.0.1:9")))
    assert (code, "the cluster cannot be reached" in said) == (74, True)


def test_without_kubectl_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = refused(capfd)
    assert (code, "kubectl is not installed" in said, "whet k8s render" in said) == (78, True, True)


WORDS = ("3e-5", "1E5", "y", "n", "Y", "0o17", "1_000", "12:30", "0x1F", ".5", "~", "null", "no", "on", "2026-01-01",
         "=", "<<", "- a", "a: b", "#x", "-1", "+.inf", "é", "two\nlines ", " ", "!a", "@b", "True")  # fmt: skip


@kinds
def test_kubectl_reads_words_that_look_like_numbers_as_text(
    kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    env = tuple(f"V{number}={word}" for number, word in enumerate(WORDS))
    assert run(words("train.py", *WORDS, kind=kind, env=env, label=("y=1e5", "n=n"), node_selector="7=0x7")) == 0
    ask_kubectl("create", "-f", "-", text=capfd.readouterr().out)
    manifests = [cluster.of(plural)[0] for plural in PLURALS[kind] if cluster.of(plural)]
    pod = pod_of(manifests)
    assert pod["containers"][0]["command"][-len(WORDS) :] == list(WORDS)
    assert set(WORDS) <= {one.get("value") for one in pod["containers"][0]["env"]}
    assert pod["nodeSelector"] == {"7": "0x7"}
    assert {"y": "1e5", "n": "n"}.items() <= manifests[-1]["metadata"]["labels"].items()


def test_the_plan_of_the_tests_is_complete() -> None:
    assert {"name", "image", "cpus", "memory", "output_claim"} == set(BASE)
