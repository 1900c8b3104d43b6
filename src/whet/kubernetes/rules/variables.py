"""Rules about variables and secrets of the processes."""

from collections.abc import Iterator
from dataclasses import fields

from whet.config import secrets
from whet.config.rules.ranges import Rule
from whet.errors import MASK, Problem
from whet.kubernetes import names
from whet.kubernetes.fields import KubernetesFields

_RESERVED = {
    "OMP_NUM_THREADS": "it follows from --cpus, --nproc_per_node and --kept_free_cores",
    "GLOO_SOCKET_IFNAME": "it follows from --network_interface",
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
        if not equals or not names.is_variable(name):
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
    good = names.is_variable(name) and names.is_object_name(secret) and (not key or names.is_label("k", key))
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
        if name in _RESERVED or name.startswith(_OF_TORCHRUN):
            return Problem(
                what=f"{name} is set by the plan",
                got=f"--env {name}",
                why=_RESERVED.get(name, "the cluster's controller and the plan set the variables of torchrun"),
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
