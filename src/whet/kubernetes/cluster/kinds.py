"""The kinds of objects of a job, by their names in the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ApiKind:
    """A kind of object: where the API has it."""

    kind: str
    group: str
    """Empty for the core of Kubernetes."""
    version: str
    plural: str


TRAINJOB = ApiKind("TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs")
RUNTIME = ApiKind("TrainingRuntime", "trainer.kubeflow.org", "v1alpha1", "trainingruntimes")
PYTORCHJOB = ApiKind("PyTorchJob", "kubeflow.org", "v1", "pytorchjobs")
JOB = ApiKind("Job", "batch", "v1", "jobs")
SERVICE = ApiKind("Service", "", "v1", "services")
CLAIM = ApiKind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
POD = ApiKind("Pod", "", "v1", "pods")

_ALL = {one.kind: one for one in (TRAINJOB, RUNTIME, PYTORCHJOB, JOB, SERVICE)}
OF_JOB = {"trainjob": (RUNTIME, TRAINJOB), "pytorchjob": (PYTORCHJOB,), "job": (SERVICE, JOB)}
"""Kind of the job -> its objects, in the order in which they are created; the last is the job itself."""


def job_kind_of(kind: ApiKind) -> str:
    """Return the `--kind` of the jobs that have such an object."""
    return next(name for name, kinds in OF_JOB.items() if kind in kinds)


def kind_of(manifest: dict[str, Any]) -> ApiKind:
    """Return the kind of a manifest."""
    return _ALL[manifest["kind"]]
