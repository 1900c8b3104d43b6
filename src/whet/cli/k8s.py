"""`whet k8s`: training jobs on Kubernetes."""

from collections.abc import Sequence

from whet.cli.commands import COMMANDS, RANKED, command
from whet.config.command_line import Command
from whet.kubernetes.arguments import KubernetesArguments


def _run(asked: KubernetesArguments) -> int:
    from whet.kubernetes.plan import OwnCommands
    from whet.kubernetes.run import run_kubernetes

    own = OwnCommands(names=COMMANDS, ranked=RANKED, settings=_settings)
    return run_kubernetes(asked, own)


def _settings(name: str, words: Sequence[str]) -> Sequence[object]:
    """Return the settings of one of whet's commands."""
    from whet.config.command_line import load

    return load(command(name), words).settings


_MAIN = (
    "action", "name", "image", "nodes", "nproc_per_node", "cpus", "memory", "max_restarts", "output_claim",
    "data_claim", "env", "env_from_secret",
)  # fmt: skip
COMMAND = Command(
    name="whet k8s",
    summary=(
        "Train on Kubernetes: render the manifests of a Kubeflow TrainJob, a PyTorchJob or a plain Indexed Job from one"
        " plan, with ranks and threads that fit the CPUs of the pods, or submit them by kubectl, which then"
        " shows, follows and deletes the job. An evicted job resumes from its newest checkpoint. The manifests hold no"
        " secrets."
    ),
    usage="render|submit NAME [--OPTION VALUE ...] [-- COMMAND ...]",
    lone="action",
    second_lone="name",
    rest="command",
    examples=(
        "whet k8s render squad --image registry.example.org/whet:1 --nodes 2 --cpus 16 --memory 64Gi"
        " --output_claim runs -- qa --model_name_or_path MODEL --dataset_name squad --do_train"
        " --output_dir /output/squad",
        "kubectl logs -f -l app.kubernetes.io/instance=squad",
    ),
    parts=(KubernetesArguments,),
    main=_MAIN,
    run=_run,
)
