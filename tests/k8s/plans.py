"""Plans of jobs for the tests, and their manifests as the program prints them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from whet.cli.main import run

QA = ("qa", "--model_name_or_path", "m", "--dataset_name", "squad", "--do_train", "--output_dir", "/output/run")
BASE = {
    "name": "squad", "image": "registry.example.org/team/whet:1.0", "cpus": "16", "memory": "64Gi",
    "output_claim": "runs",
}  # fmt: skip


def words(*command: str, action: str = "render", **options: Any) -> list[str]:
    """Return the words of a command line; an option None is left out, a tuple is repeated."""
    found = ["k8s", action]
    for name, value in {**BASE, **options}.items():
        for one in value if isinstance(value, tuple) else (value,):
            found += [] if one is None else [f"--{name}", str(one)]
    return [*found, "--", *(command or QA)]


def rendered(capfd: pytest.CaptureFixture[str], *command: str, **options: Any) -> list[dict[str, Any]]:
    """Return the manifests that `whet k8s render` prints."""
    code = run(words(*command, **options))
    printed = capfd.readouterr()
    assert code == 0, printed.err
    return list(yaml.safe_load_all(printed.out))


def refused(capfd: pytest.CaptureFixture[str], *command: str, **options: Any) -> str:
    """Return what the program says about a plan that it refuses with exit code 78, without printing a manifest."""
    code = run(words(*command, **options))
    printed = capfd.readouterr()
    assert (code, printed.out) == (78, "")
    return printed.err


def template_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of the pods, from which the cluster makes them."""
    last = manifests[-1]
    if last["kind"] == "PyTorchJob":
        return last["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    if last["kind"] == "Job":
        return last["spec"]["template"]
    replicated = manifests[0]["spec"]["template"]["spec"]["replicatedJobs"][0]
    return replicated["template"]["spec"]["template"]


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of the pods, as a cluster would put it together from all objects."""
    last, pod = manifests[-1], template_of(manifests)["spec"]
    if last["kind"] != "TrainJob":
        return pod
    trainer = last["spec"]["trainer"]
    pod["containers"][0] |= {"command": trainer["command"], "env": trainer["env"], "image": trainer["image"]}
    pod["containers"][0] |= {"resources": trainer["resourcesPerNode"]}
    return pod


def variables_of(manifests: list[dict[str, Any]]) -> dict[str, str]:
    """Return the variables with values of the pod's container."""
    container = pod_of(manifests)["containers"][0]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}
