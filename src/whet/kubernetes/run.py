"""`whet k8s`: the plan as Kubernetes objects, which are printed, or created by kubectl, all or none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import IO, Any

import yaml

from whet import json_output
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_IO, EXIT_OK, ConfigError, WhetError, escape_controls
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.plan import CACHE, DATA, OUTPUT, PORT, TEMPORARY, JobPlan, OwnCommands, build_plan

_OF_JOB = {"trainjob": ("trainjob", "trainingruntime"), "pytorchjob": ("pytorchjob",), "job": ("job", "service")}
"""Kind of the job -> the resources of its objects, as kubectl names them; the job itself is the first."""
_OPERATORS = {
    "trainjob": "Kubeflow Trainer v2 (kubeflow.org/docs/components/trainer)",
    "pytorchjob": "Kubeflow's training operator v1 (kubeflow.org/docs/components/trainer/legacy-v1)",
}
_LONGEST_S = 120
_ONE_NODE = {"ReadWriteOnce", "ReadWriteOncePod"}
_NOT_NOW = ("InternalError", "ServiceUnavailable", "Timeout", "ServerTimeout", "TooManyRequests")
_UNREACHABLE = ("connection refused", "no such host", "i/o timeout", "deadline exceeded", "unable to connect", "x509")


class ClusterError(WhetError):
    """The cluster cannot be reached, or cannot do what was asked now."""

    exit_code = EXIT_IO


class Kubectl:
    """kubectl with the cluster, the namespace and the credentials that were asked for."""

    def __init__(self, asked: KubernetesFields) -> None:
        """Raises ConfigError if kubectl is not installed."""
        named = {"kubeconfig": asked.kubeconfig, "context": asked.context, "namespace": asked.namespace}
        self.options = [f"--{name}={value}" for name, value in named.items() if value is not None]
        if shutil.which("kubectl") is None:
            raise ConfigError(
                what="kubectl is not installed",
                why="whet k8s submit creates the job's objects by it, with its credentials",
                fix="install it (kubernetes.io/docs/tasks/tools); or use whet k8s render, and on a machine with "
                "kubectl: kubectl create -f FILE",
            )

    def run(
        self, *words: str, text: str = "", output: IO[str] | int = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        """Return how kubectl ended with these words, and this text on its standard input.

        Raises ClusterError if it takes too long; what it printed until then is in `output`, if that is a file.
        """
        with subprocess.Popen(  # noqa: S603  words of a checked plan, without a shell
            ["kubectl", *self.options, *words],  # noqa: S607  the user's own
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            try:
                printed, said = process.communicate(text, _LONGEST_S)
                return subprocess.CompletedProcess(process.args, process.returncode, printed or "", said)
            except BaseException as error:
                process.kill()
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
        raise _unreachable(f"no answer within {_LONGEST_S} s")

    def command(self, *words: str) -> str:
        """Return a command line for the user, with the same options."""
        return shlex.join(["kubectl", *self.options, *words])


def submit(kubectl: Kubectl, plan: JobPlan) -> list[str]:
    """Create the job's objects; return lines for the user: what was created, and how to follow and delete it.

    If one of the objects is refused, or does not come to be in time, or the user interrupts, those before it are
    deleted again.
    """
    _require_claims(kubectl, plan)
    ours = f"app.kubernetes.io/managed-by=whet,app.kubernetes.io/instance={plan.name}"
    kinds = ",".join(_OF_JOB[plan.kind])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as names:
        try:
            done = kubectl.run("create", "-f", "-", "-o", "name", text=as_yaml(manifests(plan)), output=names)
        except (ClusterError, KeyboardInterrupt) as error:
            _delete(kubectl, names)
            see, delete = (kubectl.command(verb, kinds, "-l", ours) for verb in ("get", "delete"))
            left = f"see whether the cluster has created a part of the job, run: {see}; delete it, run: {delete}"
            if isinstance(error, ClusterError):
                raise ClusterError(
                    what="the cluster gave no answer while it created the job",
                    got=error.problems[0].got,
                    why="what it had created before was deleted again; what it was about to create may come to be",
                    fix=f"{left}; then try again",
                ) from error
            print(left, file=sys.stderr)
            raise
        if done.returncode:
            _delete(kubectl, names)
            raise _explained(kubectl, plan, done.stderr)
        created = _written(names)
    index = (
        "training.kubeflow.org/replica-index"
        if plan.kind == "pytorchjob"
        else "batch.kubernetes.io/job-completion-index"
    )
    return [
        *(f"created {name}" for name in created),
        f"see its pods:   {kubectl.command('get', f'{_OF_JOB[plan.kind][0]},pods', '-l', ours)}",
        f"why none runs:  {kubectl.command('get', 'events', '--sort-by=.lastTimestamp')}",
        f"follow rank 0:  {kubectl.command('logs', '-f', '-l', f'{ours},{index}=0', '--tail=-1')}",
        f"delete the job: {kubectl.command('delete', kinds, '-l', ours)}",
        "the claims, with all checkpoints, stay",
    ]


def _delete(kubectl: Kubectl, names: IO[str]) -> None:
    """Delete the objects that kubectl has named; what the cluster says to that is not the error of the job."""
    if created := _written(names):
        with suppress(ClusterError):
            kubectl.run("delete", "--wait=false", *created)


def _written(names: IO[str]) -> list[str]:
    names.seek(0)
    return names.read().split()


def _require_claims(kubectl: Kubectl, plan: JobPlan) -> None:
    """Raise ConfigError if a claim is missing, or cannot be mounted as the pods need it."""
    writable = (plan.asked.output_claim, plan.asked.cache_claim)
    for name in dict.fromkeys((*writable, plan.asked.data_claim)):
        if name is None:
            continue
        done = kubectl.run("get", "persistentvolumeclaim", name, "-o", "json")
        if done.returncode == 0:
            modes = json.loads(done.stdout)["spec"].get("accessModes", ())
            _require_modes(name, modes, n_pods=plan.elastic[1], writes=name in writable)
        elif "(NotFound)" in done.stderr:
            raise ConfigError(
                what=f"there is no claim {name} in the namespace",
                got=_said(done.stderr),
                why="the pods mount it, and whet creates no volumes",
                fix=f"create it, or see which claims are there, run: {kubectl.command('get', 'pvc')}; then name one in "
                "--output_claim, --data_claim or --cache_claim",
            )
        elif "(Forbidden)" not in done.stderr:  # who may not look may still submit
            raise _explained(kubectl, plan, done.stderr)


def _require_modes(name: str, modes: Sequence[str], *, n_pods: int, writes: bool) -> None:
    needed = "ReadWriteMany" if writes else "ReadWriteMany or ReadOnlyMany"
    if n_pods > 1 and set(modes) <= _ONE_NODE:
        raise ConfigError(
            what=f"the claim {name} can be mounted on one node only",
            got=f"access modes {', '.join(modes)}, and a job of {n_pods} pods",
            why="pods on other nodes would wait for it forever",
            fix=f"use a claim with the access mode {needed}, or --nodes 1 without --min_nodes and --max_nodes",
        )
    if writes and set(modes) == {"ReadOnlyMany"}:
        raise ConfigError(
            what=f"the claim {name} cannot be written to",
            got="access mode ReadOnlyMany",
            why="the pods write checkpoints to --output_claim, and downloads to --cache_claim",
            fix="use a claim with the access mode ReadWriteMany; --data_claim takes one that can only be read",
        )


def _explained(kubectl: Kubectl, plan: JobPlan, answer: str) -> WhetError:
    """Return kubectl's error with its reason and a way that works."""
    said = _said(answer)
    if any(word in said.lower() for word in _UNREACHABLE):
        return _unreachable(said)
    if "no matches for kind" in said or "doesn't have a resource type" in said:
        return ConfigError(
            what=f"the cluster does not know the objects of a {plan.kind}",
            got=said,
            why=f"{_OPERATORS.get(plan.kind, 'this version of the API')} is not installed there",
            fix="use --kind job without --min_nodes and --max_nodes, which needs nothing else; or have the cluster's "
            "administrator install it",
        )
    if "(AlreadyExists)" in said:
        return ConfigError(
            what=f"there is an object with the name {plan.name} already",
            got=said,
            why="a job cannot be changed once it exists; one that is being deleted saves a checkpoint first",
            fix=f"use another --name; or look at it, run: {kubectl.command('get', ','.join(_OF_JOB[plan.kind]))}; and "
            "delete it if nobody needs it. A new job with the same --output_dir resumes from its checkpoints",
        )
    if "(Unauthorized)" in said or "must be logged in" in said or "credentials" in said:
        return ConfigError(
            what="the cluster does not accept your credentials",
            got=said,
            why="the kubeconfig's token or certificate is wrong or has expired",
            fix=f"log in again until this works: {kubectl.command('get', 'pods')}; or name another --context",
        )
    if "(Forbidden)" in said and "admission webhook" not in said:
        right = kubectl.command("auth", "can-i", "create", _OF_JOB[plan.kind][-1])
        return ConfigError(
            what="the cluster does not allow you to create the job",
            got=said,
            why="a Role of the namespace says what you may do there, and a quota how much",
            fix=f"ask for the missing right or amount; to see what you may do, run: {right}",
        )
    if any(f"({reason})" in said for reason in _NOT_NOW):
        return ClusterError(
            what="the cluster could not create the job now",
            got=said,
            why="a part of it does not answer: if the answer names a webhook, its operator is not running",
            fix="try again; for a webhook, ask the cluster's administrator for the operator's pods, or use --kind job "
            "without --min_nodes and --max_nodes",
        )
    return ConfigError(
        what="kubectl could not create the job",
        got=said,
        why="the object breaks a rule of the cluster, or the kubeconfig leads to none",
        fix="change the option that the answer names; whet k8s render with the same options, without --kubeconfig and "
        "--context, shows the objects",
    )


def _unreachable(said: str) -> WhetError:
    return ClusterError(
        what="the cluster cannot be reached",
        got=said,
        why="nothing answers at the address of the kubeconfig, or not with the certificate that it names",
        fix="check the network (VPN, proxy) until kubectl get pods works, or name another --context",
    )


def _said(answer: str) -> str:
    """Return what kubectl said, on one line."""
    return escape_controls("; ".join(line.strip() for line in answer.splitlines() if line.strip()))


def run_kubernetes(asked: KubernetesFields, own: OwnCommands) -> int:
    """Do what was asked for; raises WhetError if the plan or the cluster refuses."""
    plan = build_plan(asked, own)
    for note in plan.notes:
        print(f"note: {escape_controls(note)}", file=sys.stderr)
        json_output.warn(note)
    if asked.action == "render":
        json_output.add(manifests=manifests(plan))
        if not json_output.is_wanted():
            print(as_yaml(manifests(plan)), end="")
    else:
        lines = submit(Kubectl(asked), plan)
        json_output.add(submitted=lines)
        print("\n".join(lines))
    return EXIT_OK


Manifest = dict[str, Any]
_CONTAINER = {"trainjob": "node", "pytorchjob": "pytorch", "job": "whet"}
"""Kind -> the container's name; the controllers of Kubeflow know theirs by it."""
_OF_QUEUES = "kueue.x-k8s.io/"
"""Labels with which Kueue admits a job: a pod that had them too would wait for an admission of its own."""
_PORT_NAME = {"pytorchjob": "pytorchjob-port"}


def labels(plan: JobPlan) -> dict[str, str]:
    """Return the labels of all that belongs to the job."""
    return {
        "app.kubernetes.io/name": "whet",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/managed-by": "whet",
    }


def metadata(plan: JobPlan, more: Mapping[str, str] = MappingProxyType({})) -> Manifest:
    """Return the metadata of an object of the job, with more labels than all have."""
    place = {} if plan.asked.namespace is None else {"namespace": plan.asked.namespace}
    return {"name": plan.name, **place, "labels": labels(plan) | dict(more)}


def job_metadata(plan: JobPlan) -> Manifest:
    """Return the metadata of the job itself, with the user's labels and annotations."""
    return metadata(plan, pairs(plan.asked.label)) | _annotations(plan)


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a dict."""
    return dict(word.split("=", 1) for word in words)


def _annotations(plan: JobPlan) -> Manifest:
    return {"annotations": pairs(plan.asked.annotation)} if plan.asked.annotation else {}


def pod_template(plan: JobPlan, process: Manifest, *, restart_policy: str | None = "Never") -> Manifest:
    """Return the template of the pods, whose container has these fields about its process."""
    own = {name: value for name, value in pairs(plan.asked.label).items() if not name.startswith(_OF_QUEUES)}
    described = {"labels": own | labels(plan), **_annotations(plan)}
    return {"metadata": described, "spec": _pod(plan, process, restart_policy)}


def process(plan: JobPlan, variables: Sequence[Manifest] = ()) -> Manifest:
    """Return what a container runs, and on what; `variables` are those that place a pod among the others."""
    named = {one.partition("=")[0] for one in (*plan.asked.env, *plan.asked.env_from_secret)}
    return {
        "command": [as_it_is(word, named) for word in plan.command],
        "env": [*variables_of(plan), *variables],
        "resources": resources(plan),
    }


_EXPANDED = re.compile(r"\$\$|\$\(([^)]*)\)")
"""What the kubelet changes in commands and variables: $$ into $, and $(NAME) into the value of a variable."""


def as_it_is(text: str, named: Collection[str]) -> str:
    """Return the text so that pods get it as it is, but for references to the `named` variables."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[1] in named else found[0].replace("$", "$$")

    return _EXPANDED.sub(escaped, text)


def resources(plan: JobPlan) -> Manifest:
    """Return equal requests and limits: a pod of the class Guaranteed, which is evicted last."""
    amounts = {"cpu": str(plan.cpus), "memory": plan.memory}
    if plan.asked.ephemeral_storage is not None:
        amounts["ephemeral-storage"] = plan.asked.ephemeral_storage
    return {"requests": dict(amounts), "limits": dict(amounts)}


def variables_of(plan: JobPlan) -> list[Manifest]:
    """Return the variables of the plan, secrets as references."""
    named = {one.partition("=")[0] for one in plan.asked.env}
    plain: list[Manifest] = [{"name": name, "value": as_it_is(value, named)} for name, value in plan.variables.items()]
    references = [
        {"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for one in plan.secrets
    ]
    return plain + references


def _pod(plan: JobPlan, process: Manifest, restart_policy: str | None) -> Manifest:
    asked, user = plan.asked, plan.asked.run_as_user
    spec: Manifest = {} if restart_policy is None else {"restartPolicy": restart_policy}
    if asked.service_account is not None:
        spec["serviceAccountName"] = asked.service_account
    if asked.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in asked.image_pull_secrets]
    if asked.node_selector:
        spec["nodeSelector"] = pairs(asked.node_selector)
    if asked.toleration:
        spec["tolerations"] = [toleration(word) for word in asked.toleration]
    return spec | {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": asked.grace_period_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, process)],
        "volumes": _volumes(plan),
    }


def toleration(word: str) -> Manifest:
    """Return the toleration of a taint: of any value without a value, of any effect without an effect."""
    taint, _, effect = word.partition(":")
    key, equals, value = taint.partition("=")
    match: Manifest = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **match, **({"effect": effect} if effect else {})}


def _container(plan: JobPlan, process: Manifest) -> Manifest:
    policy = plan.asked.image_pull_policy
    ports = [{"containerPort": PORT, "name": _PORT_NAME.get(plan.kind, "rendezvous")}] if plan.has_peers else []
    return {
        "name": _CONTAINER[plan.kind],
        "image": plan.image,
        **({} if policy is None else {"imagePullPolicy": policy}),
        "workingDir": str(OUTPUT),  # relative paths of a command lead to the claim
        **process,
        **({"ports": ports} if ports else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(plan),
    }


def _volumes(plan: JobPlan) -> list[Manifest]:
    asked = plan.asked
    claims = {"output": asked.output_claim, "data": asked.data_claim, "cache": asked.cache_claim}
    found: list[Manifest] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": asked.shared_memory}},
        {"name": "temporary", "emptyDir": {}},
    ]
    for name, claim in claims.items():
        if claim is not None:
            source: Manifest = {"claimName": claim}
            if name == "data" and claim not in (asked.output_claim, asked.cache_claim):
                source["readOnly"] = True  # drivers attach a ReadOnlyMany volume to several nodes only so
            found.append({"name": name, "persistentVolumeClaim": source})
        elif name == "cache":
            found.append({"name": name, "emptyDir": {}})
    return found


def _mounts(plan: JobPlan) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  the pod's own
        {"name": "temporary", "mountPath": TEMPORARY},
        {"name": "output", "mountPath": str(OUTPUT)},
        {"name": "cache", "mountPath": CACHE},
    ]
    if plan.asked.data_claim is not None:
        found.append({"name": "data", "mountPath": DATA, "readOnly": True})
    return found


_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOIN_S = 900
"""Seconds that a pod waits for the others: a node may have to be started, and to pull the image."""


def job(plan: JobPlan) -> list[Manifest]:
    """Return the Job, after the Service that gives its pods names if there are several."""
    own: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata(plan),
        "spec": {
            "completions": plan.nodes,
            "parallelism": plan.nodes,
            "completionMode": "Indexed",
            "backoffLimit": plan.n_failures,
            "podFailurePolicy": failure_policy("whet"),
            "template": pod_template(plan, process(plan, _variables(plan))),
        },
    }
    if plan.nodes == 1:
        return [own]
    own["spec"]["template"]["spec"]["subdomain"] = plan.name
    return [_service(plan), own]


def failure_policy(container: str) -> Manifest:
    """Return which failures of a pod count: not an eviction; and which end the job, as another start would fail too."""
    hopeless = {"containerName": container, "operator": "In", "values": [EXIT_BAD_DATA, EXIT_BAD_CONFIG]}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": hopeless},
        ]
    }


def _service(plan: JobPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": plan.name},
            "ports": [{"name": "rendezvous", "port": PORT, "targetPort": PORT}],
        },
    }


def _variables(plan: JobPlan) -> list[Manifest]:
    """Return torchrun's variables; its pods are ranked by their completion index."""
    if not plan.has_peers:
        return []
    first = f"{plan.name}-0.{plan.name}" if plan.nodes > 1 else "127.0.0.1"
    values = {"PET_NNODES": str(plan.nodes)}
    if plan.rdzv_backend == "c10d":
        values |= {
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": plan.name,
            "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
            "PET_RDZV_CONF": f"join_timeout={_JOIN_S},read_timeout={_JOIN_S}",
        }
    else:
        values |= {"PET_MASTER_ADDR": first, "PET_MASTER_PORT": str(PORT)}
    found: list[Manifest] = [{"name": name, "value": value} for name, value in values.items()]
    return [*found, {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}]


_WAIT_S = "900"
"""Seconds that a pod waits for the first one and for the others: a node may have to be started first."""


def pytorchjob(plan: JobPlan) -> list[Manifest]:
    """Return the PyTorchJob. All pods are workers that meet by c10d, of which the first keeps the store.

    With a master, the operator would give the workers an init container with amounts of its own: the pods would not be
    Guaranteed, and a restricted namespace would refuse them.
    """
    run_policy: Manifest = {"backoffLimit": plan.n_failures, "cleanPodPolicy": "None"}
    spec: Manifest = {
        "nprocPerNode": str(plan.asked.nproc_per_node),
        "runPolicy": run_policy,
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": plan.nodes,
                "restartPolicy": "OnFailure",
                "template": pod_template(plan, process(plan), restart_policy=None),
            }
        },
    }
    if plan.has_peers:
        spec["elasticPolicy"] = _elastic(plan)
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": job_metadata(plan), "spec": spec}]


def _elastic(plan: JobPlan) -> Manifest:
    fewest, most = plan.elastic
    waits = {"join_timeout": _WAIT_S, "read_timeout": _WAIT_S}
    return {
        "minReplicas": fewest,
        "maxReplicas": most,
        "maxRestarts": plan.asked.max_restarts,
        "rdzvBackend": "c10d",
        "rdzvId": plan.name,
        "rdzvPort": PORT,
        "rdzvConf": [{"key": key, "value": value} for key, value in waits.items()],
    }


API = "trainer.kubeflow.org/v1alpha1"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""The label by which the controller finds the pods that train."""


def trainjob(plan: JobPlan) -> list[Manifest]:
    """Return the runtime, which holds the pod, and the job, which holds what runs in it."""
    return [_runtime(plan), _job(plan)]


def _runtime(plan: JobPlan) -> Manifest:
    """Return the TrainingRuntime. A failure of a pod fails its Job, and the JobSet then starts all pods again."""
    hopeless = {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ranks: Manifest = {
        "name": "node",
        "template": {
            "metadata": {"labels": dict(_STEP)},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": failure_policy("node"),
                "template": pod_template(plan, {}),
            },
        },
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(plan, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": plan.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": plan.asked.max_restarts, "rules": [hopeless]},
                    "replicatedJobs": [ranks],
                }
            },
        },
    }


def _job(plan: JobPlan) -> Manifest:
    """Return the TrainJob. Without numProcPerNode the controller would start as many ranks as a pod has CPUs."""
    runs = process(plan)
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": job_metadata(plan),
        "spec": {
            "runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime", "name": plan.name},
            "trainer": {
                "image": plan.image,
                "command": runs["command"],
                "env": runs["env"],
                "numNodes": plan.nodes,
                "numProcPerNode": plan.asked.nproc_per_node,
                "resourcesPerNode": runs["resources"],
            },
        },
    }


_KINDS = {"trainjob": trainjob, "pytorchjob": pytorchjob, "job": job}
_CLEAR_WORD = re.compile(r"[A-Za-z/].+", re.DOTALL)
"""Texts that all readers of YAML agree on, except for the words that PyYAML quotes itself (true, no, null). kubectl
reads 3e-5 and 0o17 as numbers and may read y as true, which PyYAML would leave without quotes."""


def manifests(plan: JobPlan) -> list[Manifest]:
    """Return the objects of the job."""
    return _KINDS[plan.kind](plan)


def as_yaml(objects: Sequence[Manifest]) -> str:
    """Return the objects as one YAML text that kubectl reads."""
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, explicit_start=True, width=10**6)


class _Plain(yaml.SafeDumper):
    """Writes equal parts twice, where YAML would refer to the first, and quotes all strings but clear words."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _CLEAR_WORD.fullmatch(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _string)
