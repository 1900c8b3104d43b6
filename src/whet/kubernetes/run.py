"""`whet k8s` from its options to the exit code."""

from __future__ import annotations

import sys

from whet.errors import EXIT_OK, escape_controls
from whet.kubernetes.command import OwnCommands
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.manifests import as_yaml, manifests
from whet.kubernetes.plan import build_plan
from whet.kubernetes.submit import Kubectl, submit


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
