"""Rules about what each action reads: a plan for render and submit, a name for the others."""

from dataclasses import fields

from whet.config.rules.ranges import Rule
from whet.errors import Problem
from whet.kubernetes.fields import KubernetesFields

PLANNING = ("render", "submit")
"""The actions that make manifests."""
_OF_ALL = {"action", "name", "namespace", "kind"}
_OF_CLUSTER = {"kubeconfig", "context"}
_OF_LOGS = {"node_rank", "follow", "tail"}
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
    missing = [name for name in _NEEDED if getattr(asked, name) is None] if asked.action in PLANNING else []
    if not missing:
        return None
    return Problem(
        what=f"{', '.join(missing)}: not given",
        why="; ".join(_NEEDED[name][0] for name in missing),
        fix="add " + " ".join(_NEEDED[name][1] for name in missing),
    )


def there_is_a_command(asked: KubernetesFields) -> Problem | None:
    """The pods run something."""
    if asked.action not in PLANNING or asked.command:
        return None
    return Problem(
        what="there is no command for the pods",
        got="no words after --",
        why="the manifests start one command on every rank",
        fix=f"end the line with it: whet k8s {asked.action} ... -- qa --do_train --output_dir /output/run",
    )


def the_action_reads_every_option(asked: KubernetesFields) -> Problem | None:
    """No option is given that the action ignores."""
    ignored = [one.name for one in fields(asked) if one.name not in _read_by(asked.action) and _is_given(asked, one)]
    if not ignored:
        return None
    return Problem(
        what=f"whet k8s {asked.action} does not read {', '.join(ignored)}",
        got=" ".join("-- COMMAND" if name == "command" else f"--{name}" for name in ignored),
        why="an option without effect would hide a mistake",
        fix="leave " + ", ".join(ignored) + " out",
    )


def _read_by(action: str) -> set[str]:
    if action in PLANNING:
        plan = {one.name for one in fields(KubernetesFields)} - _OF_LOGS
        return plan if action == "submit" else plan - _OF_CLUSTER
    return _OF_ALL | _OF_CLUSTER | (_OF_LOGS if action == "logs" else set())


def _is_given(asked: KubernetesFields, one: object) -> bool:
    name, default = one.name, one.default  # type: ignore[attr-defined]
    return getattr(asked, name) != default


ACTION_RULES: tuple[Rule, ...] = (a_plan_is_complete, there_is_a_command, the_action_reads_every_option)
