"""`whet k8s` from its options to the exit code."""

from __future__ import annotations

import sys

from whet.errors import EXIT_OK, escape_controls
from whet.kubernetes.command import OwnCommands
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.manifests.render import as_yaml, manifests
from whet.kubernetes.plan import build_plan


def run_kubernetes(asked: KubernetesFields, own: OwnCommands) -> int:
    """Do what was asked for; raises WhetError if the plan or the cluster refuses."""
    plan = build_plan(asked, own) if asked.action in ("render", "submit") else None
    for note in plan.notes if plan is not None else ():
        print(f"note: {escape_controls(note)}", file=sys.stderr)
    if plan is not None and asked.action == "render":
        print(as_yaml(manifests(plan)), end="")
        return EXIT_OK
    from whet.kubernetes.cluster import logs, status, submit
    from whet.kubernetes.cluster.client import connect

    cluster = connect(asked)
    if plan is not None:
        _say_each("created", submit.submit(cluster, plan))
        print(f"follow it: whet k8s logs {cluster.options(asked.name, asked.kind)}")
    elif asked.action == "status":
        print("\n".join(escape_controls(line) for line in status.status(cluster, asked)))
    elif asked.action == "delete":
        deleted, others = submit.delete(cluster, asked)
        _say_each("deleted", deleted)
        _say_each("left alone, as whet did not create it:", others)
        print("the claims, with all checkpoints, stay")
    else:
        return logs.print_logs(cluster, asked)
    return EXIT_OK


def _say_each(done: str, names: list[str]) -> None:
    for name in names:
        print(f"{done} {name}")
