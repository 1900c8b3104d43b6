"""Rules about names: the cluster refuses wrong ones, and late: some only when it makes the pods."""

from collections.abc import Iterator

from whet.config import secrets
from whet.config.rules.ranges import Rule
from whet.errors import Problem
from whet.kubernetes import names
from whet.kubernetes.fields import KubernetesFields

_OBJECTS = ("service_account", "output_claim", "data_claim", "cache_claim")
_SET_BY_OTHERS = (
    "app.kubernetes.io/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/", "trainer.kubeflow.org/",
    "training.kubeflow.org/",
)  # fmt: skip
"""Prefixes of the labels by which whet and the controllers find the job's pods."""
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def the_name_is_one_of_dns(asked: KubernetesFields) -> Problem | None:
    """The job's name is a label of DNS that begins with a letter."""
    if names.is_job_name(asked.name):
        return None
    return Problem(
        what="the job has no name" if not asked.name else "name is no name for a job",
        got=asked.name or None,
        why="it becomes the host name of pods: lower-case letters, digits and dashes, a letter first, at most 63 "
        "characters (DNS label, RFC 1035)",
        fix="use a name such as --name squad-1",
    )


def pods_have_valid_names(asked: KubernetesFields) -> Problem | None:
    """The name is short enough for what the cluster appends to it."""
    last = names.longest_pod_name(asked.kind, asked.name, max(asked.max_nodes or 0, asked.nodes, 1) - 1)
    if not names.is_job_name(asked.name) or len(last) <= names.LONGEST:
        return None
    return Problem(
        what="name is too long for the names of the pods",
        got=f"{last}, {len(last)} characters",
        why=f"the name of a pod has at most {names.LONGEST} characters, and the cluster refuses longer ones only "
        "when it makes the pod",
        fix=f"use a --name of at most {names.LONGEST - len(last) + len(asked.name)} characters",
    )


def other_objects_have_valid_names(asked: KubernetesFields) -> Problem | None:
    """Claims, Secrets, accounts and the namespace can exist."""
    given = [(name, getattr(asked, name)) for name in _OBJECTS]
    given += [("image_pull_secrets", one) for one in asked.image_pull_secrets]
    for name, value in given:
        if value is not None and not names.is_object_name(value):
            return Problem(
                what=f"{name} is no name of an object in Kubernetes",
                got=value,
                why="such names have lower-case letters, digits, dashes and dots, and begin and end with a letter or "
                "digit",
                fix=f"use the name that kubectl get shows, --{name} NAME",
            )
    return None


def the_namespace_can_exist(asked: KubernetesFields) -> Problem | None:
    """A namespace is part of host names, so dots end it."""
    if asked.namespace is None or names.is_namespace(asked.namespace):
        return None
    return Problem(
        what="namespace is no name of a namespace",
        got=asked.namespace,
        why="it is a DNS label: lower-case letters, digits and dashes, at most 63 characters",
        fix="use the name that kubectl get namespaces shows, --namespace NAME",
    )


def the_interface_is_one(asked: KubernetesFields) -> Problem | None:
    """The interface has a name that Linux accepts."""
    if names.is_interface(asked.network_interface):
        return None
    return Problem(
        what="network_interface is no name of an interface",
        got=asked.network_interface,
        why="the ranks would not find each other; Linux's names have up to 15 letters, digits, dots and dashes",
        fix="leave --network_interface out for eth0, or use a name that ip link shows in a pod",
    )


def the_image_is_one(asked: KubernetesFields) -> Problem | None:
    """The image is a name that a container engine understands; one with a secret is refused without showing it."""
    if asked.image is None or names.is_image(asked.image) or secrets.is_token(asked.image):
        return None
    return Problem(
        what="image is no name of a container image",
        got=asked.image,
        why="it has the form REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST, without https:// and in lower case",
        fix="use --image REGISTRY/NAME:TAG",
    )


def labels_are_pairs(asked: KubernetesFields) -> Problem | None:
    """Labels and node selectors have a name and a value that Kubernetes accepts."""
    twice = _given_twice(asked)
    if twice is not None:
        return twice
    for option, word in _labels(asked):
        name, equals, value = word.partition("=")
        if option != "node_selector" and name.startswith(_SET_BY_OTHERS):
            return Problem(
                what=f"{option}s of this prefix are set by whet and by the cluster's controllers",
                got=word,
                why="the job's pods are found by them",
                fix=f"use one without {', '.join(_SET_BY_OTHERS)}",
            )
        if option == "annotation":
            if equals and names.is_label(name, "any"):
                continue
            return Problem(
                what="annotation is no annotation",
                got=word,
                why="an annotation is NAME=VALUE; the name has at most 63 letters, digits, dashes, dots and "
                "underscores, and may have a prefix such as example.org/",
                fix="use the form --annotation example.org/owner=team",
            )
        if not equals or not names.is_label(name, value):
            return Problem(
                what=f"{option} is no label",
                got=word,
                why="a label is NAME=VALUE; both have at most 63 letters, digits, dashes, dots and underscores, and "
                "the name may have a prefix such as example.org/",
                fix=f"use the form --{option} disktype=ssd",
            )
    return None


def tolerations_are_of_taints(asked: KubernetesFields) -> Problem | None:
    """Tolerations are written as taints are."""
    for word in asked.toleration:
        taint, colon, effect = word.partition(":")
        key, _, value = taint.partition("=")
        if not names.is_label(key, value) or (colon and effect not in _EFFECTS):
            return Problem(
                what="toleration is no taint",
                got=word,
                why=f"it is KEY=VALUE:EFFECT, KEY:EFFECT, KEY=VALUE or KEY, and EFFECT one of {', '.join(_EFFECTS)}",
                fix="use the form --toleration dedicated=training:NoSchedule; kubectl describe node shows the taints",
            )
    return None


def _given_twice(asked: KubernetesFields) -> Problem | None:
    given = [(option, word.partition("=")[0]) for option, word in _labels(asked)]
    twice = sorted({f"--{option} {name}" for option, name in given if given.count((option, name)) > 1})
    if not twice:
        return None
    return Problem(
        what="a label or annotation is given twice",
        got=", ".join(twice),
        why="an object has one value for each name, so only one of them would count",
        fix="keep one of them for each name",
    )


def _labels(asked: KubernetesFields) -> Iterator[tuple[str, str]]:
    for option in ("label", "annotation", "node_selector"):
        yield from ((option, word) for word in getattr(asked, option))


NAMING_RULES: tuple[Rule, ...] = (
    the_name_is_one_of_dns, pods_have_valid_names, other_objects_have_valid_names, the_namespace_can_exist,
    the_interface_is_one, the_image_is_one, labels_are_pairs, tolerations_are_of_taints,
)  # fmt: skip
