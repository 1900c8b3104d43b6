"""`whet k8s`: the manifests are printed, or created by kubectl, all or none, after a look at the claims."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from whet.errors import EXIT_IO, EXIT_OK, ConfigError, WhetError, escape_controls
from whet.kubernetes.command import OwnCommands
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.manifests import as_yaml, manifests
from whet.kubernetes.plan import JobPlan, build_plan

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

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Return how kubectl ended with these words, and this text on its standard input."""
        try:
            return subprocess.run(  # noqa: S603  words of a checked plan, without a shell
                ["kubectl", *self.options, *words],  # noqa: S607  the user's own
                input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=_LONGEST_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise _unreachable(f"no answer within {_LONGEST_S} s") from error

    def command(self, *words: str) -> str:
        """Return a command line for the user, with the same options."""
        return shlex.join(["kubectl", *self.options, *words])


def submit(kubectl: Kubectl, plan: JobPlan) -> list[str]:
    """Create the job's objects; return lines for the user: what was created, and how to follow and delete it.

    If one of the objects is refused, those before it are deleted again.
    """
    _require_claims(kubectl, plan)
    done = kubectl.run("create", "-f", "-", "-o", "name", text=as_yaml(manifests(plan)))
    created = done.stdout.split()
    if done.returncode:
        if created:
            kubectl.run("delete", "--wait=false", *created)
        raise _explained(kubectl, plan, done.stderr)
    index = (
        "training.kubeflow.org/replica-index"
        if plan.kind == "pytorchjob"
        else "batch.kubernetes.io/job-completion-index"
    )
    ours = f"app.kubernetes.io/managed-by=whet,app.kubernetes.io/instance={plan.name}"
    kinds = ",".join(_OF_JOB[plan.kind])
    return [
        *(f"created {name}" for name in created),
        f"see its pods:   {kubectl.command('get', f'{_OF_JOB[plan.kind][0]},pods', '-l', ours)}",
        f"follow rank 0:  {kubectl.command('logs', '-f', '-l', f'{ours},{index}=0', '--tail=-1')}",
        f"delete the job: {kubectl.command('delete', kinds, '-l', ours)}",
        "the claims, with all checkpoints, stay",
    ]


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
    if asked.action == "render":
        print(as_yaml(manifests(plan)), end="")
    else:
        print("\n".join(submit(Kubectl(asked), plan)))
    return EXIT_OK
