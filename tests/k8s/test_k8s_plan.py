"""What the pods of a plan get: ranks, threads, amounts, protection, and how they continue after an eviction."""

from __future__ import annotations

from typing import Any

import pytest
from plans import QA, pod_of, rendered, template_of, variables_of

from machines import MACHINES
from whet.hardware import topology
from whet.hardware.rank_plan import plan_ranks

KINDS = ("trainjob", "pytorchjob", "job")


@pytest.mark.parametrize("kind", KINDS)
def test_threads_follow_from_the_cpus(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"cpus": "16"}, 16),
        ({"cpus": "15", "nproc_per_node": 2}, 7),  # 7 cores each, of which none can be spared
        ({"cpus": "240", "nproc_per_node": 2, "nodes": 4}, 119),
        ({"cpus": "240", "nproc_per_node": 2, "cpus_per_core": 2}, 59),
        ({"cpus": "16", "nodes": 2, "kept_free_cores": 4}, 12),
    ]
    for options, n_threads in cases:
        assert variables_of(rendered(capfd, kind=kind, **options))["OMP_NUM_THREADS"] == str(n_threads)


def test_threads_are_those_of_whet_launch(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """56 cores in two nodes: the launcher on such a machine and the plan of such a pod agree."""
    machine = topology.read(MACHINES["two sockets"]().write(tmp_path))
    launched = {rank.n_threads for rank in plan_ranks(machine)}
    manifests = rendered(capfd, cpus=str(len(machine.cores)), nproc_per_node=len(machine.nodes))
    assert {int(variables_of(manifests)["OMP_NUM_THREADS"])} == launched


@pytest.mark.parametrize("kind", KINDS)
def test_labels_annotations_and_tolerations_reach_the_pods(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """istio and other webhooks read the pods, and the scheduler does; Kueue reads the job."""
    manifests = rendered(
        capfd, kind=kind, label=("sidecar.istio.io/inject=false", "kueue.x-k8s.io/queue-name=team"),
        annotation=("example.org/note=a, b=c",), ephemeral_storage="20Gi",
        toleration=("dedicated=training:NoSchedule", "spot:NoExecute", "zone=a", "gpu"),
    )  # fmt: skip
    job, template = manifests[-1]["metadata"], template_of(manifests)
    assert job["labels"].items() >= {("sidecar.istio.io/inject", "false"), ("kueue.x-k8s.io/queue-name", "team")}
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == "squad"
    assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"]
    assert job["annotations"] == template["metadata"]["annotations"] == {"example.org/note": "a, b=c"}
    assert template["spec"]["tolerations"] == [
        {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
        {"key": "zone", "operator": "Equal", "value": "a"},
        {"key": "gpu", "operator": "Exists"},
    ]
    amounts = pod_of(manifests)["containers"][0]["resources"]
    assert amounts["requests"]["ephemeral-storage"] == amounts["limits"]["ephemeral-storage"] == "20Gi"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_an_amount_of_memory(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    pod = pod_of(rendered(capfd, kind=kind, memory="68719476736", shared_memory="1073741824"))
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "68719476736"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_guaranteed_and_the_count_of_ranks_is_explicit(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capfd, kind=kind, nodes=2, nproc_per_node=2, cpus="16")
    pod = pod_of(manifests)
    amounts = pod["containers"][0]["resources"]
    assert amounts["requests"] == amounts["limits"] == {"cpu": "16", "memory": "64Gi"}
    assert len(pod["containers"]) == 1
    assert "initContainers" not in pod
    assert "--nproc_per_node=2" in pod["containers"][0]["command"]
    assert "'auto'" not in str(manifests).replace("{'name': 'WHET_RESUME', 'value': 'auto'}", "")
    spec = manifests[-1]["spec"]
    assert spec.get("nprocPerNode", spec.get("trainer", {}).get("numProcPerNode")) == {
        "trainjob": 2,
        "pytorchjob": "2",
    }.get(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_may_do_little_and_write_to_their_volumes_only(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    pod = pod_of(rendered(capfd, kind=kind, data_claim="data", cache_claim="models", shared_memory="2Gi"))
    container = pod["containers"][0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    sources = {path: volumes[mount["name"]] for path, mount in mounts.items()}
    assert sources["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    claims = {
        path: one["persistentVolumeClaim"]["claimName"]
        for path, one in sources.items()
        if len(path) > 4 and "persistentVolumeClaim" in one
    }
    assert claims == {"/output": "runs", "/data": "data", "/cache": "models"}
    assert mounts["/data"]["readOnly"] is True
    assert sources["/data"]["persistentVolumeClaim"]["readOnly"] is True
    variables = variables_of(rendered(capfd, kind=kind))
    assert all(
        variables[name].startswith(("/tmp", "/cache")) for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME")
    )
    assert container["workingDir"] == "/output"


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_pod_has_time_to_save_and_the_next_one_resumes(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capfd, kind=kind, nodes=2, grace_period_s=600)
    pod = pod_of(manifests)
    assert pod["terminationGracePeriodSeconds"] == 600
    assert int(variables_of(manifests)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) in range(500, 600)
    assert variables_of(manifests)["WHET_RESUME"] == "auto"
    ids = [variables_of(rendered(capfd, kind=kind, nodes=2, cpus=cpus))["WHET_LAUNCH_ID"] for cpus in (16, 16, 8)]
    assert ids[0] == ids[1] != ids[2], "a job has the same id whenever it is rendered"
    if kind != "pytorchjob":
        owner = (
            manifests[-1]["spec"]
            if kind == "job"
            else manifests[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        )
        first = owner["podFailurePolicy"]["rules"][0]
        assert (first["action"], first["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert pod["restartPolicy"] == "Never"
    else:
        assert manifests[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"


def test_pods_get_the_words_of_the_command_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """What it resumes from is its own affair, or that of its settings file, also of one that is not read here."""
    for given in ((), ("--resume_from_checkpoint", "/output/run/checkpoint-8"), ("--config", "/data/run.yaml")):
        manifests = rendered(capfd, *QA, *given, data_claim="data")
        command = pod_of(manifests)["containers"][0]["command"]
        assert command[command.index("qa") :] == [*QA, *given]
        assert variables_of(manifests)["WHET_RESUME"] == "auto"


def test_one_rank_runs_without_torchrun_so_that_its_exit_code_counts(capfd: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capfd, kind="job")
    assert [one["kind"] for one in manifests] == ["Job"]
    container = pod_of(manifests)["containers"][0]
    assert container["command"][:4] == ["python", "-m", "whet", "qa"]
    ends = manifests[0]["spec"]["podFailurePolicy"]["rules"][1]
    assert (ends["action"], ends["onExitCodes"]["values"]) == ("FailJob", [65, 78])
    assert ends["onExitCodes"]["containerName"] == container["name"]
    assert "GLOO_SOCKET_IFNAME" not in variables_of(manifests)


def test_pods_of_a_job_find_each_other_through_their_service(capfd: pytest.CaptureFixture[str]) -> None:
    service, job = rendered(capfd, kind="job", nodes=3, namespace="ml")
    template = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (3, 3, "Indexed")
    variables = variables_of([service, job])
    assert variables["PET_MASTER_ADDR"] == "squad-0.squad"
    assert variables["PET_NNODES"] == "3"
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    rank = next(one for one in template["spec"]["containers"][0]["env"] if one["name"] == "PET_NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert {one["metadata"]["namespace"] for one in (service, job)} == {"ml"}


def test_a_job_with_c10d_meets_at_its_first_pod(capfd: pytest.CaptureFixture[str]) -> None:
    variables = variables_of(rendered(capfd, kind="job", nodes=2, rdzv_backend="c10d", network_interface="net1"))
    assert variables["PET_RDZV_ENDPOINT"] == "squad-0.squad:29500"
    assert variables["PET_RDZV_BACKEND"] == "c10d"
    assert variables["GLOO_SOCKET_IFNAME"] == "net1"
    assert "PET_MASTER_ADDR" not in variables


def test_a_pytorchjob_is_elastic_between_its_limits(capfd: pytest.CaptureFixture[str]) -> None:
    (job,) = rendered(capfd, kind="pytorchjob", nodes=2, min_nodes=1, max_nodes=4, max_restarts=10)
    policy = job["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (1, 4, 10)
    assert policy["rdzvBackend"] == "c10d"
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert "--max_restarts=10" in pod_of([job])["containers"][0]["command"]
    assert "nProcPerNode" not in policy  # the webhook refuses it next to nprocPerNode


def test_secrets_are_references(capfd: pytest.CaptureFixture[str]) -> None:
    pod = pod_of(rendered(capfd, env_from_secret=("HF_TOKEN=hub", "WANDB_API_KEY=trackers/wandb")))
    env = {one["name"]: one.get("valueFrom") for one in pod["containers"][0]["env"]}
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
    assert env["WANDB_API_KEY"] == {"secretKeyRef": {"name": "trackers", "key": "wandb"}}


def test_scripts_and_modules_run_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    script = pod_of(rendered(capfd, "/app/train.py", "--epochs", "2", nodes=2))["containers"][0]["command"]
    assert script[0] == "torchrun"
    assert script[-3:] == ["/app/train.py", "--epochs", "2"]
    module = pod_of(rendered(capfd, "-m", "my.package"))["containers"][0]["command"]
    assert module == ["python", "-m", "my.package"]
