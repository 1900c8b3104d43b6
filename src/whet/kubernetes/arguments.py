"""The options of `whet k8s`, and the rules of Kubernetes that a cluster would apply late or never."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from decimal import Decimal

from whet.config import secrets
from whet.config.environment import LAUNCH
from whet.config.rules.ranges import Rule, at_least, at_most, broken_if
from whet.config.settings import checked
from whet.errors import MASK, Problem
from whet.hardware.openmp import LIMIT_THREADS
from whet.kubernetes.fields import KubernetesFields

_LONGEST = 63
"""Characters of a DNS label, which the name of every pod must be as well."""
_DNS_1035 = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[a-z0-9.-]+(?::\d+)?/)?{_IMAGE_PART}(?:/{_IMAGE_PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
_INTERFACES = re.compile(r"[A-Za-z0-9][\w.@-]{0,14}(?:,[A-Za-z0-9][\w.@-]{0,14})*", re.ASCII)
"""Names that Linux takes for an interface; gloo takes several with commas."""
_SUFFIX = {"trainjob": "-node-0-{}-abcde", "pytorchjob": "-worker-{}", "job": "-{}"}
"""Kind -> what the cluster appends to the job's name for the name of a pod, or its host name.

The webhook of JobSet counts the five random characters of a TrainJob's pods as well."""


def is_job_name(text: str) -> bool:
    """Return whether the text is a DNS label that begins with a letter (RFC 1035)."""
    return len(text) <= _LONGEST and _DNS_1035.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Return whether other objects (claims, Secrets, accounts) can have this name."""
    return len(text) <= 253 and _DNS_1123.fullmatch(text) is not None


def is_label(name: str, value: str) -> bool:
    """Return whether this is a label with or without a prefix: team, kueue.x-k8s.io/queue-name."""
    prefix, slash, own = name.rpartition("/")
    named = bool(own) and len(own) <= _LONGEST and _LABEL_VALUE.fullmatch(own) is not None
    return named and (not slash or is_object_name(prefix)) and is_label_value(value)


def is_label_value(value: str) -> bool:
    """Return whether a label can have this value."""
    return len(value) <= _LONGEST and _LABEL_VALUE.fullmatch(value) is not None


def longest_pod_name(kind: str, name: str, index: int) -> str:
    """Return the name of the job's pod with this index, as long as the cluster counts it."""
    return name + _SUFFIX[kind].format(index)


_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:(m|k|[MGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?")
_FACTORS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_FACTORS |= {letter: Decimal(1000) ** (n + 2) for n, letter in enumerate("MGTPE")}
_FACTORS |= {f"{letter}i": Decimal(1024) ** (n + 1) for n, letter in enumerate("KMGTPE")}


def read_quantity(text: str) -> Decimal | None:
    """Return the amount in units (bytes, CPUs), None if this is no quantity of Kubernetes."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    number, suffix, exponent = found.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _FACTORS[suffix or ""])


_NEEDED = {
    "image": ("every pod runs the same container image, with whet in it", "--image REGISTRY/NAME:TAG"),
    "cpus": ("without a limit, a pod's threads would be those of the complete node", "--cpus 16"),
    "memory": ("pods without a memory limit are the first that a full node ends", "--memory 64Gi"),
    "output_claim": (
        "checkpoints and the model would be gone with the pod, and an evicted run could not resume",
        "--output_claim CLAIM, the name of a PersistentVolumeClaim",
    ),
}
"""Fields that a plan needs -> why, and how they are given."""


def a_plan_is_complete(asked: KubernetesFields) -> Problem | None:
    """Manifests have an image, amounts and a place for the output."""
    missing = [name for name in _NEEDED if getattr(asked, name) is None]
    if not missing:
        return None
    return Problem(
        what=f"{', '.join(missing)}: not given",
        why="; ".join(_NEEDED[name][0] for name in missing),
        fix="add " + " ".join(_NEEDED[name][1] for name in missing),
    )


def render_needs_no_cluster(asked: KubernetesFields) -> Problem | None:
    """No option is given that the action ignores."""
    ignored = [name for name in ("kubeconfig", "context") if getattr(asked, name) is not None]
    if asked.action == "submit" or not ignored:
        return None
    return Problem(
        what=f"whet k8s render does not read {', '.join(ignored)}",
        got=" ".join(f"--{name}" for name in ignored),
        why="it prints the manifests, and asks no cluster",
        fix=f"leave {', '.join(ignored)} out",
    )


ACTION_RULES: tuple[Rule, ...] = (
    a_plan_is_complete,
    broken_if(
        "there_is_a_command",
        ("command",),
        lambda asked: not asked.command,
        what="there is no command for the pods",
        why="the manifests start one command on every rank",
        fix="end the line with it: whet k8s render NAME ... -- qa --do_train --output_dir /output/run",
    ),
    render_needs_no_cluster,
)


_OBJECTS = ("service_account", "output_claim", "data_claim", "cache_claim")
_SET_BY_OTHERS = (
    "app.kubernetes.io/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/", "trainer.kubeflow.org/",
    "training.kubeflow.org/",
)  # fmt: skip
"""Prefixes of the labels by which whet and the controllers find the job's pods."""
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def pods_have_valid_names(asked: KubernetesFields) -> Problem | None:
    """The name is short enough for what the cluster appends to it."""
    last = longest_pod_name(asked.kind, asked.name, max(asked.max_nodes or 0, asked.nodes, 1) - 1)
    if not is_job_name(asked.name) or len(last) <= _LONGEST:
        return None
    return Problem(
        what="name is too long for the names of the pods",
        got=f"{last}, {len(last)} characters",
        why=f"the name of a pod has at most {_LONGEST} characters, and the cluster refuses longer ones only "
        "when it makes the pod",
        fix=f"use a --name of at most {_LONGEST - len(last) + len(asked.name)} characters",
    )


def other_objects_have_valid_names(asked: KubernetesFields) -> Problem | None:
    """Claims, Secrets, accounts and the namespace can exist."""
    given = [(name, getattr(asked, name)) for name in _OBJECTS]
    given += [("image_pull_secrets", one) for one in asked.image_pull_secrets]
    for name, value in given:
        if value is not None and not is_object_name(value):
            return Problem(
                what=f"{name} is no name of an object in Kubernetes",
                got=value,
                why="such names have lower-case letters, digits, dashes and dots, and begin and end with a letter or "
                "digit",
                fix=f"use the name that kubectl get shows, --{name} NAME",
            )
    return None


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
            if equals and is_label(name, "any"):
                continue
            return Problem(
                what="annotation is no annotation",
                got=word,
                why="an annotation is NAME=VALUE; the name has at most 63 letters, digits, dashes, dots and "
                "underscores, and may have a prefix such as example.org/",
                fix="use the form --annotation example.org/owner=team",
            )
        if not equals or not is_label(name, value):
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
        if not is_label(key, value) or (colon and effect not in _EFFECTS):
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
    broken_if(
        "the_name_is_one_of_dns",
        ("name",),
        lambda asked: not is_job_name(asked.name),
        what="name is no name for a job",
        why="it becomes the host name of pods: lower-case letters, digits and dashes, a letter first, at most 63 "
        "characters (DNS label, RFC 1035)",
        fix="use a name such as --name squad-1",
    ),
    pods_have_valid_names,
    other_objects_have_valid_names,
    broken_if(
        "the_namespace_can_exist",
        ("namespace",),
        lambda asked: (
            asked.namespace is not None
            and (len(asked.namespace) > _LONGEST or "." in asked.namespace or not is_object_name(asked.namespace))
        ),
        what="namespace is no name of a namespace",
        why="it is a DNS label: lower-case letters, digits and dashes, at most 63 characters",
        fix="use the name that kubectl get namespaces shows, --namespace NAME",
    ),
    broken_if(
        "the_interface_is_one",
        ("network_interface",),
        lambda asked: not _INTERFACES.fullmatch(asked.network_interface),
        what="network_interface is no name of an interface",
        why="the ranks would not find each other; Linux's names have up to 15 letters, digits, dots and dashes",
        fix="leave --network_interface out for eth0, or use a name that ip link shows in a pod",
    ),
    broken_if(  # one with a secret is refused elsewhere, without being shown
        "the_image_is_one",
        ("image",),
        lambda asked: asked.image is not None and not (_IMAGE.fullmatch(asked.image) or secrets.is_token(asked.image)),
        what="image is no name of a container image",
        why="it has the form REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST, without https:// and in lower case",
        fix="use --image REGISTRY/NAME:TAG",
    ),
    labels_are_pairs,
    tolerations_are_of_taints,
)


_INT32 = 2**31 - 1
_RENDEZVOUS = {"trainjob": "static", "pytorchjob": "c10d"}
"""The one whose variables the controller of a job sets."""


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


NODE_RULES: tuple[Rule, ...] = (
    at_least("nodes", 1, "a job has at least one pod"),
    at_least("nproc_per_node", 1, "a pod runs at least one process"),
    at_least("min_nodes", 1, "a job has at least one pod"),
    at_least("max_restarts", 0, "it is a count"),
    broken_if(
        "only_pytorchjob_is_elastic",
        ("kind", "min_nodes", "max_nodes"),
        lambda asked: asked.kind != "pytorchjob" and (asked.min_nodes, asked.max_nodes) != (None, None),
        what="this kind of job has a fixed number of pods",
        why="neither a TrainJob (JobSet) nor an Indexed Job starts with fewer pods than it has",
        fix="use --kind pytorchjob, or leave --min_nodes and --max_nodes out",
    ),
    the_range_contains_nodes,
    broken_if(
        "the_rendezvous_fits_the_kind",
        ("kind", "rdzv_backend"),
        lambda asked: asked.rdzv_backend not in (None, _RENDEZVOUS.get(asked.kind, asked.rdzv_backend)),
        what="this kind of job has another rendezvous",
        why="the controller of a trainjob gives the pods the addresses of a static one, that of a pytorchjob of c10d",
        fix="leave --rdzv_backend out; --kind job takes both",
    ),
    broken_if(
        "nobody_is_root",
        ("run_as_user",),
        lambda asked: asked.run_as_user < 1,
        what="pods do not run as root",
        why="training needs no rights of root, and namespaces with the restricted policy refuse such pods",
        fix="use --run_as_user 1000; the files of the claims are made readable for this group (fsGroup)",
    ),
    at_most("nodes", 100_000, "an Indexed Job has at most 100,000 pods"),
    at_most("max_nodes", 100_000, "no cluster has more pods for one job"),
    at_most("nproc_per_node", _INT32, "the cluster stores it as a number of 32 bits"),
    at_most("run_as_user", _INT32, "the cluster takes user numbers of 31 bits"),
    at_most("grace_period_s", _INT32, "that is 68 years"),
    restarts_can_be_counted,
)


_LEAST = {"memory": 2**28, "shared_memory": 2**20, "ephemeral_storage": 2**26}
"""Bytes below which an amount is a mistake: no run fits, or /dev/shm and the disk hold nothing."""
_USUAL_MOST = 2**42
"""Bytes up to which a number without a unit may be meant with one."""
_MOST_MEMORY = 2**50
"""Bytes that no pod has: the cluster would accept the job, and no node would ever take it."""
_MOST_CPUS = 2**16
_SPELLED = re.compile(r"0*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?b?)?", re.IGNORECASE)
"""How amounts are written elsewhere: 64, 64 GB, 1.5gib."""
_EXAMPLES = {"memory": "64Gi", "shared_memory": "1Gi", "ephemeral_storage": "20Gi"}


def cpus_are_whole(asked: KubernetesFields) -> Problem | None:
    """A pod asks for a whole number of CPUs: the kubelet gives a pod CPUs of its own only then."""
    amount = _amount(asked.cpus)
    if asked.cpus is None or (amount is not None and 1 <= amount <= _MOST_CPUS and amount == int(amount)):
        return None
    near = max(1, int(amount)) if amount is not None and amount <= _MOST_CPUS else 16
    return Problem(
        what="cpus is not a whole number of CPUs",
        got=asked.cpus,
        why="a thread on a part of a CPU waits for the scheduler in every step, and all other threads wait for it; "
        "the kubelet gives CPUs of its own only to pods that ask for a whole number, which some node must have",
        fix=f"use --cpus {near}",
    )


def every_rank_has_a_thread(asked: KubernetesFields) -> Problem | None:
    """The CPUs are enough for the ranks."""
    amount = _amount(asked.cpus)
    if amount is None or min(asked.nproc_per_node, asked.cpus_per_core) < 1:
        return None
    if amount >= asked.nproc_per_node * asked.cpus_per_core:
        return None
    return Problem(
        what=f"{asked.nproc_per_node} ranks do not fit on {asked.cpus} CPUs",
        got=f"--cpus {asked.cpus} --nproc_per_node {asked.nproc_per_node} --cpus_per_core {asked.cpus_per_core}",
        why="each rank needs a core of its own: two ranks on one core take its time from each other",
        fix=f"use --cpus {asked.nproc_per_node * asked.cpus_per_core} or more, or fewer ranks",
    )


def memory_is_an_amount(asked: KubernetesFields) -> Problem | None:
    """Memory, shared memory and storage are quantities of Kubernetes: bytes, unless a unit follows."""
    for name in _LEAST:
        text = getattr(asked, name)
        amount = _amount(text)
        if text is not None and not _is_enough(name, amount):
            return Problem(
                what=f"{name} is no amount" if amount is None else f"{name} is too {_size(name, amount)}",
                got=text if amount is None else f"{text}, which is {int(amount)} bytes",
                why="Kubernetes counts bytes unless a unit follows, without a space: Mi, Gi, Ti, or M, G, T; a pod "
                f"needs at least {_LEAST[name] >> 20}Mi of it, and no node has more than 1024Ti",
                fix=f"use {' or '.join(f'--{name} {one}' for one in _meant(name, text))}",
            )
    return None


def _size(name: str, amount: Decimal) -> str:
    return "small" if amount < _LEAST[name] else "large"


def _amount(text: str | None) -> Decimal | None:
    return None if text is None else read_quantity(text)


def _is_enough(name: str, amount: Decimal | None) -> bool:
    return amount is not None and _LEAST[name] <= amount <= _MOST_MEMORY


def _meant(name: str, text: str) -> list[str]:
    """Return the amounts that may be meant, as Kubernetes writes them; an example if there is none."""
    found = _SPELLED.fullmatch(text.strip())
    units = found[2].upper() if found and found[2] else "GM"
    tried = [f"{found[1]}{unit}i" for unit in units] if found else []
    return [one for one in tried if _LEAST[name] <= (_amount(one) or 0) <= _USUAL_MOST] or [_EXAMPLES[name]]


AMOUNT_RULES: tuple[Rule, ...] = (
    cpus_are_whole,
    at_least("cpus_per_core", 1, "a thread needs at least one CPU"),
    at_least("kept_free_cores", 0, "it is a count"),
    every_rank_has_a_thread,
    memory_is_an_amount,
    broken_if(
        "shared_memory_is_a_part",
        ("shared_memory", "memory"),
        lambda asked: (
            (memory := _amount(asked.memory)) is not None
            and (shared := _amount(asked.shared_memory)) is not None
            and memory >= _LEAST["memory"]
            and shared > memory / 2
        ),
        what="shared_memory is more than half of memory",
        why="shared memory is part of the pod's memory: if both are used in full, the kernel ends the pod",
        fix="use a --shared_memory of at most half of --memory, or more --memory",
    ),
    at_least(
        "grace_period_s",
        30,
        "an evicted run finishes its step and saves a checkpoint before the kubelet kills it; what it cannot save is "
        "trained again",
    ),
)


RESERVED = {
    "OMP_NUM_THREADS": "it follows from --cpus, --nproc_per_node and --kept_free_cores",
    **dict.fromkeys(LIMIT_THREADS, "torch would take it in the place of OMP_NUM_THREADS, which follows from --cpus"),
    "GLOO_SOCKET_IFNAME": "it follows from --network_interface",
    LAUNCH: "it is another one for each job that is submitted",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "it follows from --grace_period_s: with less, torchrun kills ranks that save",
    "HF_HOME": "it is a folder of the cache, the only place for downloads that pods can write to",
    **dict.fromkeys(("HOME", "TMPDIR"), "it is the writable folder /tmp: the root file system is read-only"),
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
         "MASTER_PORT"),
        "the launcher in the pod sets it for every rank",
    ),
}  # fmt: skip
"""Variables that the plan decides -> why."""
_OF_TORCHRUN = "PET_"


def variables_are_pairs(asked: KubernetesFields) -> Problem | None:
    """Every variable has a name and a value, or a name and a Secret."""
    for pair in asked.env:
        name, equals, _ = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            return Problem(
                what="env is not NAME=VALUE",
                got=secrets.masked(pair),
                why="a variable has a name of letters, digits and underscores, and a value after =",
                fix="use the form --env LOGLEVEL=INFO",
            )
    for pair in asked.env_from_secret:
        if secret_reference(pair) is None:
            return Problem(
                what="env_from_secret is not NAME=SECRET/KEY",
                got=secrets.masked(pair),
                why="it names a Secret of the namespace and one of its keys, never the value itself",
                fix="make the Secret, run: kubectl create secret generic hub --from-file=HF_TOKEN; then use "
                "--env_from_secret HF_TOKEN=hub/HF_TOKEN",
            )
    return None


def secret_reference(pair: str) -> tuple[str, str, str] | None:
    """Return the variable, the Secret and its key in NAME=SECRET/KEY; None if it has another form."""
    name, _, reference = pair.partition("=")
    secret, _, key = reference.partition("/")
    good = _VARIABLE.fullmatch(name) and is_object_name(secret) and (not key or is_label("k", key))
    return (name, secret, key or name) if good and not secrets.is_token(pair) else None


_IN_VARIABLES = (
    "make a Secret from a file that holds only the value, run: kubectl create secret generic hub --from-file=HF_TOKEN; "
    "then use --env_from_secret HF_TOKEN=hub/HF_TOKEN in its place (whet reads HF_TOKEN by itself; a script's option "
    "takes '$(HF_TOKEN)')"
)
_IN_IMAGE = (
    "write --image without it, and let nodes log in to the registry with a Secret: kubectl create secret "
    "docker-registry pull --from-file=config.json (docker's own); then add --image_pull_secrets pull"
)


def no_secret_is_in_clear(asked: KubernetesFields) -> Problem | None:
    """A manifest contains references to secrets, never their values."""
    found = [f"--env {name}" for name in secrets.in_variables(asked.env)]
    found += [f"{flag} of the command" for flag in secrets.in_command(asked.command)]
    fixes = [_IN_VARIABLES] if found else []
    if others := [f"--{name}" for name, texts in _other_texts(asked) if any(map(secrets.in_text, texts))]:
        found, fixes = [*found, *others], [*fixes, f"leave the secret out of {', '.join(others)}"]
        fixes = fixes if _IN_VARIABLES in fixes else [*fixes, f"for the processes, {_IN_VARIABLES}"]
    if secrets.is_token(asked.image or ""):
        found, fixes = [*found, "--image"], [*fixes, _IN_IMAGE]
    if not found:
        return None
    return Problem(
        what="a manifest would contain a secret in clear",
        got=", ".join(f"{one} {MASK}" for one in found),
        why="everyone who may read the job, its pods or the file could read it, and clusters keep it for long",
        fix="; ".join(fixes),
    )


def _other_texts(asked: KubernetesFields) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the other options that are texts: all of them become part of the manifests, or of an error."""
    for one in fields(asked):
        value = getattr(asked, one.name)
        if one.name not in ("env", "env_from_secret", "command", "image") and isinstance(value, str | tuple):
            yield one.name, (value,) if isinstance(value, str) else value


def the_plan_decides_alone(asked: KubernetesFields) -> Problem | None:
    """Variables that follow from the plan, or that controllers set, are not given."""
    given = [pair.partition("=")[0] for pair in (*asked.env, *asked.env_from_secret)]
    for name in given:
        if name in RESERVED or name.startswith(_OF_TORCHRUN):
            return Problem(
                what=f"{name} is set by the plan",
                got=f"--env {name}",
                why=RESERVED.get(name, "the cluster's controller and the plan set the variables of torchrun"),
                fix=f"leave {name} out",
            )
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        return Problem(
            what=f"{', '.join(twice)}: given twice",
            why="only one of the values would count",
            fix="keep one --env or --env_from_secret for each variable",
        )
    return None


VARIABLE_RULES: tuple[Rule, ...] = (variables_are_pairs, no_secret_is_in_clear, the_plan_decides_alone)


def _without_secrets(rule: Rule) -> Rule:
    """Return the rule; its problems show no value that looks like a secret."""

    def quiet(asked: KubernetesFields) -> Problem | None:
        found = rule(asked)
        if found is None:
            return None
        got = found.got if found.got is None else secrets.masked(str(found.got))
        return replace(found, what=secrets.masked(found.what), got=got)

    return quiet


_ALL: tuple[Rule, ...] = (*ACTION_RULES, *NAMING_RULES, *NODE_RULES, *AMOUNT_RULES, *VARIABLE_RULES)
RULES: tuple[Rule, ...] = tuple(_without_secrets(rule) for rule in _ALL)


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
