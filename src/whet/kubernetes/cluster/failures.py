"""What a cluster answers when it refuses, as an error with its reason and a way that works."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from whet.errors import EXIT_IO, ConfigError, StorageError, WhetError
from whet.kubernetes.cluster.client import Cluster
from whet.kubernetes.cluster.kinds import CLAIM, ApiKind

_OPERATOR = {
    "trainer.kubeflow.org": "Kubeflow Trainer v2 (kubeflow.org/docs/components/trainer)",
    "kubeflow.org": "Kubeflow's training operator v1 (kubeflow.org/docs/components/trainer/legacy-v1)",
}
_NOT_NOW = frozenset({409, 429, 500, 502, 503, 504})


class ClusterError(WhetError):
    """The cluster cannot be reached, or cannot do what was asked now."""

    exit_code = EXIT_IO


@contextmanager
def explained(doing: str, cluster: Cluster, kind: ApiKind, name: str) -> Iterator[None]:
    """Turn what the client raises within the block into errors with a fix; `doing` is a verb of the API: create."""
    try:
        yield
    except cluster.refusal as error:
        raise _of_answer(error, _Asked(doing, cluster, kind, name)) from error
    except (cluster.interruption, OSError) as error:
        raise _unreachable(error) from error


class _Asked:
    """What was asked of the cluster."""

    def __init__(self, doing: str, cluster: Cluster, kind: ApiKind, name: str) -> None:
        self.doing, self.kind, self.name = doing, kind, name
        self.namespace, self.access = cluster.namespace, cluster.access

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}.{self.kind.group}" if self.kind.group else self.kind.plural

    def __str__(self) -> str:
        return f"{self.doing} {self.kind.kind} {self.name} in namespace {self.namespace}"


def _of_answer(error: Any, asked: _Asked) -> WhetError:
    message = answer_of(error)
    if "admission webhook" in message or error.status in (400, 422):
        return _refused(message, asked)
    if error.status in _NOT_NOW:
        return _not_now(error.status, message, asked)
    make: Callable[[str, _Asked], WhetError] = {401: _unknown_user, 403: _forbidden}.get(error.status, _refused)
    if error.status == 404:
        make = _no_object if _body(error).get("details", {}).get("name") else _no_definition
    return make(message, asked)


def answer_of(error: Any) -> str:
    """Return what the cluster said about its refusal."""
    return _body(error).get("message") or str(error.body or error.reason)


def _body(error: Any) -> dict[str, Any]:
    try:
        found = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unknown_user(message: str, asked: _Asked) -> WhetError:
    return ConfigError(
        what="the cluster does not accept your credentials (401)",
        got=message,
        why="the kubeconfig's token or certificate is wrong or has expired",
        fix="log in to the cluster again until kubectl get pods works, or name another --context",
    )


def _forbidden(message: str, asked: _Asked) -> WhetError:
    return ConfigError(
        what=f"the cluster does not allow you to {asked} (403)",
        got=message,
        why="a Role of the namespace says what you may do there, and a quota how much",
        fix=f"ask for the missing right or amount; to see what you may do, run: kubectl auth can-i {asked.doing} "
        f"{asked.resource} -n {asked.namespace}{asked.access}",
    )


def _no_object(message: str, asked: _Asked) -> WhetError:
    if asked.kind == CLAIM:
        return _no_claim(message, asked)
    return ConfigError(
        what=f"there is no {asked.kind.kind} {asked.name} in namespace {asked.namespace} (404)",
        got=message,
        why="either the name, the namespace or the kind is another",
        fix=f"see what is there, run: kubectl get {asked.resource} -A{asked.access}; then use its --name and "
        "--namespace, and the --kind of whet k8s submit",
    )


def _no_claim(message: str, asked: _Asked) -> WhetError:
    return ConfigError(
        what=f"there is no claim {asked.name} in namespace {asked.namespace} (404)",
        got=message,
        why="the pods mount it, and whet creates no volumes",
        fix=f"create it, or see which claims are there, run: kubectl get pvc -n {asked.namespace}{asked.access}; then "
        "name one in --output_claim, --data_claim or --cache_claim",
    )


def _no_definition(message: str, asked: _Asked) -> WhetError:
    operator = _OPERATOR.get(asked.kind.group, "this version of the API")
    return ConfigError(
        what=f"the cluster does not know the kind {asked.kind.kind} (404)",
        got=message,
        why=f"{operator} is not installed there",
        fix="use --kind job without --min_nodes and --max_nodes, which needs nothing else; or have the cluster's "
        "administrator install it",
    )


def _refused(message: str, asked: _Asked) -> WhetError:
    return ConfigError(
        what=f"the cluster refused to {asked}",
        got=message,
        why="the object breaks a rule of the cluster: its definition, its operator's webhook or a policy",
        fix="change the option that the answer names; whet k8s render with the same options, without --kubeconfig and "
        "--context, shows the object",
    )


def _not_now(status: int, message: str, asked: _Asked) -> WhetError:
    return ClusterError(
        what=f"the cluster could not {asked} ({status})",
        got=message,
        why="a part of it does not answer: if the answer names a webhook, its operator is not running",
        fix="try again; for a webhook, ask the cluster's administrator for the operator's pods, or use --kind job "
        "without --min_nodes and --max_nodes",
    )


def _unreachable(error: Exception) -> WhetError:
    return StorageError(
        what="the cluster cannot be reached",
        got=str(error),
        why="nothing answers at the address of the kubeconfig, or not with the certificate that it names",
        fix="check the network (VPN, proxy) until kubectl get pods works, or name another --context",
    )
