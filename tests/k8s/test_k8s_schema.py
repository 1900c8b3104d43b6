"""Rendered manifests satisfy the definitions of Kubeflow; the check itself finds planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from crd_schema import NEWER, OLDER, findings
from plans import rendered

Manifests = list[dict[str, Any]]

MATRIX = {
    "one pod, one rank": {},
    "one pod, two ranks": {"nproc_per_node": 2},
    "four pods": {"nodes": 4, "nproc_per_node": 2},
    "namespace and accounts": {
        "namespace": "ml", "service_account": "trainer", "image_pull_secrets": ("one", "two"),
        "image_pull_policy": "Always",
    },
    "claims and nodes": {
        "data_claim": "data", "cache_claim": "cache", "node_selector": ("node-type=gnr", "zone=a"),
        "label": ("kueue.x-k8s.io/queue-name=team",), "nodes": 2,
    },
    "variables and secrets": {
        "env": ("LOGLEVEL=INFO", "HF_HUB_CACHE=/cache/hub"),
        "env_from_secret": ("HF_TOKEN=hub", "WANDB_API_KEY=trackers/wandb"),
    },
    "for the pods": {
        "toleration": ("dedicated=training:NoSchedule", "spot:NoExecute", "zone=a", "gpu"),
        "annotation": ("sidecar.istio.io/inject=false", "note=two words, and more"), "nodes": 2,
        "label": ("sidecar.istio.io/inject=false",), "ephemeral_storage": "20Gi",
    },
    "amounts": {"cpus": "240", "memory": "128Gi", "shared_memory": "16Gi", "kept_free_cores": 2, "cpus_per_core": 2},
    "times": {"grace_period_s": 1800, "max_restarts": 0, "run_as_user": 65532},
}  # fmt: skip
OF_KIND = {
    "trainjob": [],
    "pytorchjob": [{"min_nodes": 1, "max_nodes": 4}, {"nodes": 2, "max_nodes": 8, "max_restarts": 10}],
    "job": [{"nodes": 2, "rdzv_backend": "c10d"}, {"nodes": 2, "rdzv_backend": "static"}],
}


@pytest.mark.parametrize("kind", OF_KIND)
def test_manifests_satisfy_the_definitions(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every field of a Service and of a Job is one that the official client knows, too."""
    models = pytest.importorskip("kubernetes").client.models
    for options in (*MATRIX.values(), *OF_KIND[kind]):
        for one in rendered(capfd, **options, kind=kind):
            if one["kind"] in ("Service", "Job"):
                assert unknown_fields(one, getattr(models, f"V1{one['kind']}"), models) == []
            if one["kind"] != "Service":
                assert [found for files in ({}, NEWER, OLDER) for found in findings(one, files)] == [], options


def test_a_trainjob_keeps_every_field_in_the_typed_models_of_kubeflow(capfd: pytest.CaptureFixture[str]) -> None:
    """The models drop fields that they do not know, and raise for values of another type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for one in [one for options in MATRIX.values() for one in rendered(capfd, **options)]:
        kept = getattr(models, f"TrainerV1alpha1{one['kind']}").from_dict(one).to_dict()
        assert with_defaults(one) == kept


def with_defaults(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with the protocol of its ports, which the models add."""
    if manifest["kind"] == "TrainingRuntime":
        for port in _pod([manifest, {"spec": {}}])["containers"][0].get("ports", []):
            port["protocol"] = "TCP"
    return manifest


def unknown_fields(value: Any, model: Any, models: Any, path: str = "$") -> list[str]:
    """Return the fields of an object that a model of the client does not have."""
    fields = {name: model.openapi_types[field] for field, name in model.attribute_map.items()}
    found = [f"{path}.{name}" for name in value if name not in fields]
    for name, child in value.items():
        kind = fields.get(name, "").removeprefix("list[").removesuffix("]")
        inner = getattr(models, kind, None)
        for one in child if isinstance(child, list) else [child]:
            found += (
                []
                if inner is None or not isinstance(one, dict)
                else unknown_fields(one, inner, models, f"{path}.{name}")
            )
    return found


def _trainer(manifests: Manifests) -> dict[str, Any]:
    return manifests[-1]["spec"]["trainer"]


def _pod(manifests: Manifests) -> dict[str, Any]:
    last = manifests[-1]["spec"]
    if "template" in last:
        return last["template"]["spec"]
    if "pytorchReplicaSpecs" in last:
        return last["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return manifests[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def _amounts(manifests: Manifests) -> dict[str, Any]:
    if manifests[-1]["kind"] == "TrainJob":
        return _trainer(manifests)["resourcesPerNode"]
    return _pod(manifests)["containers"][0]["resources"]


def _variables(manifests: Manifests) -> list[dict[str, Any]]:
    return (
        _trainer(manifests)["env"] if manifests[-1]["kind"] == "TrainJob" else _pod(manifests)["containers"][0]["env"]
    )


def _count_as_text(manifests: Manifests) -> None:
    spec = manifests[-1]["spec"]
    if manifests[-1]["kind"] == "TrainJob":
        spec["trainer"]["numNodes"] = "2"
    elif manifests[-1]["kind"] == "PyTorchJob":
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = "2"
    else:
        spec["completions"] = "2"


def _auto_ranks(manifests: Manifests) -> None:
    spec = manifests[-1]["spec"]
    if manifests[-1]["kind"] == "TrainJob":
        spec["trainer"]["numProcPerNode"] = "auto"
    elif manifests[-1]["kind"] == "PyTorchJob":
        spec["nprocPerNode"] = 2
    else:
        spec["parallelism"] = "auto"


FAULTS: dict[str, Callable[[Manifests], Any]] = {
    "an unknown field": lambda found: found[-1]["spec"].update(trainer2={}),
    "a count as text": _count_as_text,
    "a variable that is a number": lambda found: _variables(found)[0].update(value=15),
    "an amount with a space": lambda found: _amounts(found)["limits"].update(memory="128 Gi"),
    "a misspelled mount": lambda found: _pod(found)["containers"][0]["volumeMounts"][0].update(mountpath="/x"),
    "a mount without its path": lambda found: _pod(found)["containers"][0]["volumeMounts"][0].pop("mountPath"),
    "ranks of the wrong type": _auto_ranks,
    "two variables of one name": lambda found: _variables(found).append(dict(_variables(found)[0])),
}


def _count_of_34_bits(manifests: Manifests) -> None:
    spec = manifests[-1]["spec"]
    if manifests[-1]["kind"] == "TrainJob":
        spec["trainer"]["numNodes"] = 2**33
    elif manifests[-1]["kind"] == "PyTorchJob":
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2**33
    else:
        spec["backoffLimit"] = 2**33


FAULTS["a number of 34 bits"] = _count_of_34_bits


@pytest.mark.parametrize("kind", OF_KIND)
def test_planted_faults_are_found(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, plant in FAULTS.items():
        manifests = rendered(capfd, kind=kind, nodes=2)
        plant(manifests)
        assert [found for one in manifests if one["kind"] != "Service" for found in findings(one)], name
