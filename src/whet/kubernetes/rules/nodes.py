"""Rules about how many pods and ranks there are, and how they find each other."""

from whet.config.rules.ranges import Rule, at_least
from whet.errors import Problem
from whet.kubernetes.fields import KubernetesFields

_INT32 = 2**31 - 1
_MOST_PODS = 100_000
_LIMITS = {
    "nodes": (_MOST_PODS, "an Indexed Job has at most 100,000 pods"),
    "max_nodes": (_MOST_PODS, "no cluster has more pods for one job"),
    "nproc_per_node": (_INT32, "the cluster stores it as a number of 32 bits"),
    "run_as_user": (_INT32, "the cluster takes user numbers of 31 bits"),
    "grace_period_s": (_INT32, "that is 68 years"),
}
"""Numbers with a limit that only the server or its webhooks apply -> the limit, and why."""


def numbers_are_accepted_by_the_cluster(asked: KubernetesFields) -> Problem | None:
    """No number is larger than the cluster's server takes."""
    for name, (most, why) in _LIMITS.items():
        given = getattr(asked, name)
        if given is not None and given > most:
            return Problem(what=f"{name} is too large", got=given, why=why, fix=f"use --{name} {most} or less")
    return None


def restarts_can_be_counted(asked: KubernetesFields) -> Problem | None:
    """The failures that a job survives, over all of its pods, are one number of the cluster."""
    pods = max(asked.max_nodes or asked.nodes, 1)
    if asked.max_restarts * pods <= _INT32:
        return None
    return Problem(
        what="max_restarts is too large",
        got=f"--max_restarts {asked.max_restarts} with {pods} pods",
        why=f"the cluster counts the failures of all pods up to {_INT32}, in a number of 32 bits",
        fix=f"use --max_restarts {_INT32 // pods} or less",
    )


def only_pytorchjob_is_elastic(asked: KubernetesFields) -> Problem | None:
    """A range of pods needs a controller that keeps to it."""
    if asked.kind == "pytorchjob" or (asked.min_nodes, asked.max_nodes) == (None, None):
        return None
    return Problem(
        what=f"a {asked.kind} has a fixed number of pods",
        got=" ".join(f"--{n} {getattr(asked, n)}" for n in ("min_nodes", "max_nodes") if getattr(asked, n) is not None),
        why="neither a TrainJob (JobSet) nor an Indexed Job starts with fewer pods than it has",
        fix="use --kind pytorchjob, or leave --min_nodes and --max_nodes out",
    )


def the_range_contains_nodes(asked: KubernetesFields) -> Problem | None:
    """The job begins with a number of pods between the two limits."""
    low, high = asked.min_nodes or 1, asked.max_nodes or max(asked.nodes, asked.min_nodes or 1)
    if low <= asked.nodes <= high:
        return None
    if low > high:
        return _no_range(asked, low, high)
    fits = min(max(asked.nodes, low), high)
    return Problem(
        what="nodes is not between min_nodes and max_nodes",
        got=" ".join(f"--{name} {getattr(asked, name)}" for name in ("nodes", "min_nodes", "max_nodes")),
        why="the job is created with this many pods, and may shrink and grow from there",
        fix=f"use --nodes {fits}, or another --min_nodes or --max_nodes",
    )


def _no_range(asked: KubernetesFields, low: int, high: int) -> Problem:
    least, most = max(1, min(asked.nodes, high)), max(asked.nodes, low)
    return Problem(
        what="min_nodes is above max_nodes",
        got=f"--min_nodes {asked.min_nodes} --max_nodes {asked.max_nodes}",
        why="the job shrinks to the first number of pods and grows to the second",
        fix=f"use --min_nodes {least} --max_nodes {most}",
    )


def the_rendezvous_fits_the_kind(asked: KubernetesFields) -> Problem | None:
    """Each controller sets the variables of one kind of rendezvous."""
    only = {"trainjob": "static", "pytorchjob": "c10d"}.get(asked.kind)
    if asked.rdzv_backend is None or only is None or asked.rdzv_backend == only:
        return None
    return Problem(
        what=f"a {asked.kind} has no {asked.rdzv_backend} rendezvous",
        got=f"--kind {asked.kind} --rdzv_backend {asked.rdzv_backend}",
        why=f"its controller gives the pods the addresses of a {only} rendezvous",
        fix="leave --rdzv_backend out; --kind job takes both",
    )


def nobody_is_root(asked: KubernetesFields) -> Problem | None:
    """Processes run without the rights of root, as restricted namespaces demand."""
    if asked.run_as_user >= 1:
        return None
    return Problem(
        what="pods do not run as root",
        got=f"run_as_user {asked.run_as_user}",
        why="training needs no rights of root, and namespaces with the restricted policy refuse such pods",
        fix="use --run_as_user 1000; the files of the claims are made readable for this group (fsGroup)",
    )


NODE_RULES: tuple[Rule, ...] = (
    at_least("nodes", 1, "a job has at least one pod"),
    at_least("nproc_per_node", 1, "a pod runs at least one process"),
    at_least("min_nodes", 1, "a job has at least one pod"),
    at_least("max_restarts", 0, "it is a count"),
    at_least("node_rank", 0, "pods are counted from 0"),
    at_least("tail", 0, "it is a count of lines"),
    only_pytorchjob_is_elastic,
    the_range_contains_nodes,
    the_rendezvous_fits_the_kind,
    nobody_is_root,
    numbers_are_accepted_by_the_cluster,
    restarts_can_be_counted,
)
