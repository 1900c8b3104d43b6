"""The connection to a cluster, by the credentials that kubectl uses."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml import YAMLError

from whet.errors import ConfigError
from whet.kubernetes.fields import KubernetesFields
from whet.optional import extra, require

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECT_S, _ANSWER_S = 10, 60
TIMEOUT = (_CONNECT_S, _ANSWER_S)
"""Seconds to connect, and for an answer."""
FOLLOWING = (_CONNECT_S, 600)
"""The same for an answer that lasts as long as a pod; after so much silence it is asked for again."""


@dataclass(frozen=True)
class Cluster:
    """A cluster and the namespace in which the job is."""

    namespace: str
    core: Any
    """The client of pods, claims and Services."""
    objects: Any
    """The client of objects of any kind, as plain dicts."""
    refusal: type[Exception]
    """What both raise for an answer that is no success; it has a status and a body."""
    interruption: type[Exception]
    """What both raise if there is no answer, or only the beginning of one."""
    access: str = ""
    """The options, each after a space, by which whet and kubectl reach the same cluster again."""

    def options(self, name: str, kind: str) -> str:
        """Return the options by which another `whet k8s` finds the job."""
        return f"--name {name} --kind {kind} --namespace {self.namespace}{self.access}"

    def dicts(self, answer: Any) -> Any:
        """Return an answer of the typed client as plain dicts and lists, with the names of the API."""
        return self.core.api_client.sanitize_for_serialization(answer)


def connect(asked: KubernetesFields) -> Cluster:
    """Return the cluster of the kubeconfig, or of this pod; raises ConfigError if neither leads to one."""
    client, config, exceptions = (_part(f"kubernetes.{name}") for name in ("client", "config", "client.exceptions"))
    try:
        if _is_in_pod(asked):
            settings = client.Configuration()
            config.load_incluster_config(client_configuration=settings)
            api, usual = client.ApiClient(settings), _IN_POD.read_text("utf-8").strip()
        else:
            api = config.new_client_from_config(_file(asked), asked.context, persist_config=False)
            usual = _namespace_of_context(config, asked)
    except (config.ConfigException, YAMLError, OSError, TypeError, AttributeError) as error:
        raise _no_cluster(asked, error) from error
    broken = _part("urllib3.exceptions").HTTPError
    return Cluster(
        namespace=asked.namespace or usual,
        core=client.CoreV1Api(api),
        objects=client.CustomObjectsApi(api),
        refusal=exceptions.ApiException,
        interruption=broken,
        access="".join(
            f" --{name} {shlex.quote(value)}"
            for name, value in (("context", asked.context), ("kubeconfig", asked.kubeconfig))
            if value is not None
        ),
    )


def _part(name: str) -> Any:
    """Return a module of the client; raises ConfigError if it is not installed."""
    return require(name, needed_for="whet k8s, except for render,", install=extra("kubernetes"))


def _is_in_pod(asked: KubernetesFields) -> bool:
    named = asked.kubeconfig or asked.context or os.environ.get("KUBECONFIG")
    here = (Path.home() / ".kube" / "config").exists()
    return not named and not here and "KUBERNETES_SERVICE_HOST" in os.environ


def _file(asked: KubernetesFields) -> str:
    """Return the kubeconfig; the client itself reads the variable only once, when it is imported."""
    return asked.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"


def _namespace_of_context(config: Any, asked: KubernetesFields) -> str:
    contexts, current = config.list_kube_config_contexts(_file(asked))
    chosen = next((one for one in contexts if one["name"] == asked.context), current)
    return chosen["context"].get("namespace") or "default"


def _no_cluster(asked: KubernetesFields, error: Exception) -> ConfigError:
    return ConfigError(
        what="the kubeconfig leads to no cluster",
        got=f"{_file(asked)}{f', context {asked.context}' if asked.context else ''}: {error}",
        why="it holds the cluster's address and your credentials",
        fix="use the file and the context with which kubectl get pods works: --kubeconfig FILE --context NAME",
    )
