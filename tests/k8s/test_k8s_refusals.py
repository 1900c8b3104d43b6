"""Plans that a cluster would refuse, or run badly, are refused here, each with the way that works."""

from __future__ import annotations

from typing import Any

import pytest
from plans import refused, words

from whet.cli.main import run

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a part of a CPU": ({"cpus": "7500m"}, "--cpus 7"),
    "half a CPU": ({"cpus": "0.5"}, "--cpus 1"),
    "no number of CPUs": ({"cpus": "auto"}, "--cpus 16"),
    "no CPUs": ({"cpus": None}, "--cpus 16"),
    "more ranks than CPUs": ({"cpus": "2", "nproc_per_node": 4}, "--cpus 4"),
    "memory without a unit": ({"memory": "64"}, "--memory 64Gi"),
    "memory in bytes": ({"memory": "8000"}, "use --memory 8000Mi"),
    "memory of either unit": ({"memory": "512"}, "--memory 512Gi or --memory 512Mi"),
    "memory in thousandths": ({"memory": "8000m"}, "8000m, which is 8 bytes"),
    "shared memory in bytes": ({"shared_memory": "64"}, "--shared_memory 64Gi or --shared_memory 64Mi"),
    "storage in bytes": ({"ephemeral_storage": "20"}, "--ephemeral_storage 20Gi"),
    "storage of another spelling": ({"ephemeral_storage": "20 GB"}, "--ephemeral_storage 20Gi"),
    "an annotation without a value": ({"annotation": "a"}, "--annotation example.org/owner=team"),
    "an annotation of a controller": ({"annotation": "batch.kubernetes.io/a=b"}, "use one without"),
    "a toleration without a key": ({"toleration": ":NoSchedule"}, "--toleration dedicated=training:NoSchedule"),
    "a toleration of no effect": ({"toleration": "a=b:Never"}, "NoSchedule, PreferNoSchedule, NoExecute"),
    "memory with a space": ({"memory": "128 Gi"}, "--memory 128Gi"),
    "memory of another spelling": ({"memory": "64GB"}, "--memory 64Gi"),
    "megabytes of another spelling": ({"memory": "65536MiB"}, "--memory 65536Mi"),
    "no memory": ({"memory": None}, "--memory 64Gi"),
    "shared memory without a unit": ({"shared_memory": "2gb"}, "--shared_memory 2Gi"),
    "shared memory of the pod's size": ({"shared_memory": "64Gi"}, "half of 64Gi"),
    "an upper-case name": ({"name": "Squad"}, "--name squad-1"),
    "a name that begins with a digit": ({"name": "1squad"}, "--name squad-1"),
    "a name with a dot": ({"name": "squad.v1"}, "--name squad-1"),
    "no name": ({"name": None}, "--name squad-1"),
    "a name of 64 letters": ({"name": "a" * 64}, "--name squad-1"),
    "a name too long for its pods": ({"name": "a" * 49}, "at most 48 characters"),
    "the same for ten pods more": ({"name": "a" * 48, "nodes": 11}, "at most 47 characters"),
    "the same for a PyTorchJob": ({"name": "a" * 60, "kind": "pytorchjob", "max_nodes": 11}, "at most 53 characters"),
    "the same for a Job": ({"name": "a" * 62, "kind": "job"}, "at most 61 characters"),
    "no pods": ({"nodes": 0}, "--nodes 1"),
    "no ranks": ({"nproc_per_node": 0}, "--nproc_per_node 1"),
    "ranks by guess": ({"nproc_per_node": "auto"}, "nproc_per_node"),
    "an elastic TrainJob": ({"min_nodes": 1, "max_nodes": 4}, "--kind pytorchjob"),
    "an elastic Job": ({"kind": "job", "max_nodes": 4}, "--kind pytorchjob"),
    "more pods than the most": ({"kind": "pytorchjob", "nodes": 8, "max_nodes": 4}, "--nodes 4"),
    "c10d in a TrainJob": ({"rdzv_backend": "c10d"}, "--kind job"),
    "a static PyTorchJob": ({"kind": "pytorchjob", "rdzv_backend": "static"}, "--kind job"),
    "root": ({"run_as_user": 0}, "--run_as_user 1000"),
    "a claim that cannot be": ({"output_claim": "My_Claim"}, "--output_claim NAME"),
    "no claim for the output": ({"output_claim": None}, "--output_claim CLAIM"),
    "no image": ({"image": None}, "--image REGISTRY/NAME:TAG"),
    "an image with a scheme": ({"image": "https://example.org/whet"}, "--image REGISTRY/NAME:TAG"),
    "a selector without a value": ({"node_selector": "gnr"}, "--node_selector disktype=ssd"),
    "a label of whet's own": ({"label": "app.kubernetes.io/instance=x"}, "without app.kubernetes.io/"),
    "no time to save": ({"grace_period_s": 5}, "--grace_period_s 30"),
    "a variable without a value": ({"env": "LOGLEVEL"}, "--env LOGLEVEL=INFO"),
    "threads by hand": ({"env": "OMP_NUM_THREADS=64"}, "leave OMP_NUM_THREADS out"),
    "the controller's variables": ({"env": "PET_NNODES=4"}, "leave PET_NNODES out"),
    "a variable twice": ({"env": ("A=1", "A=2")}, "keep one --env"),
    "a secret without a Secret": ({"env_from_secret": "HF_TOKEN"}, "--env_from_secret HF_TOKEN=hub/HF_TOKEN"),
    "an empty interface": ({"network_interface": ""}, "leave --network_interface out"),
    "no interface": ({"network_interface": "not an interface; rm -rf /"}, "leave --network_interface out"),
    "a label twice": ({"label": ("a=1", "a=2")}, "keep one of them"),
    "a selector twice": ({"node_selector": ("a=1", "a=1")}, "keep one of them"),
    "an image with two slashes": ({"image": "a//b"}, "--image REGISTRY/NAME:TAG"),
    "an image that ends with a slash": ({"image": "a/"}, "--image REGISTRY/NAME:TAG"),
    "memory that no node has": ({"memory": "1e30"}, "--memory 64Gi"),
    "memory beyond all numbers": ({"memory": "1e999999999"}, "--memory 64Gi"),
    "shared memory that no node has": ({"shared_memory": "9999999Ti"}, "--shared_memory 1Gi"),
    "CPUs that no node has": ({"cpus": "10000000"}, "--cpus 16"),
    "a namespace with a dot": ({"namespace": "a.b"}, "kubectl get namespaces"),
    "a user beyond the limit": ({"run_as_user": 2**31}, "--run_as_user 2147483647"),
    "restarts beyond the limit": ({"max_restarts": 2**31}, "--max_restarts 2147483647"),
    "restarts of two pods": ({"max_restarts": 2**31 - 1, "nodes": 2}, "--max_restarts 1073741823"),
    "pods beyond the limit": ({"nodes": 100_001, "kind": "job"}, "--nodes 100000"),
    "the most pods beyond the limit": ({"max_nodes": 10**9, "kind": "pytorchjob"}, "--max_nodes 100000"),
    "a grace period of an age": ({"grace_period_s": 10**12}, "--grace_period_s 2147483647"),
    "the end of torchrun by hand": (
        {"env": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1", "nodes": 2},
        "leave TORCH_ELASTIC_SHUTDOWN_TIMEOUT out",
    ),
    "an option of another action": ({"context": "prod"}, "leave context out"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_refused_with_a_way_that_works(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    options, fix = CASES[case]
    assert fix in " ".join(refused(capfd, **options).split())


def test_render_refuses_options_of_submit(capfd: pytest.CaptureFixture[str]) -> None:
    said = " ".join(refused(capfd, kubeconfig="k", context="c").split())
    assert "whet k8s render does not read kubeconfig, context" in said


def test_a_command_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["k8s", "render", "--name", "a", "--image", "i", "--cpus", "2", "--memory", "4Gi", "--output_claim", "c"])
        == 78
    )
    assert "-- qa --do_train" in " ".join(capfd.readouterr().err.split())


def test_the_job_may_be_named_without_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with_flag = words()
    at = with_flag.index("--name")
    assert run([*with_flag[:at], *with_flag[at + 1 :]]) == 0
    assert capfd.readouterr().out.count("name: squad") == 3
    assert run(["k8s", "render", "squad", "more"]) == 78
