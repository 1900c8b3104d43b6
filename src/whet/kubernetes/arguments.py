"""The options of `whet k8s`."""

from dataclasses import dataclass

from whet.config.settings import checked
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.rules import RULES

_HEADINGS = {
    "action": "Job",
    "nodes": "Pods",
    "max_restarts": "Failures and eviction",
    "output_claim": "Storage",
    "env": "Environment",
    "kubeconfig": "Cluster",
}


@checked(headings=_HEADINGS, rules=RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesArguments(KubernetesFields):
    """What runs on the cluster, on which pods, and what `whet k8s` does with it. Raises ConfigError for any problem."""
