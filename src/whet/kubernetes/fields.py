"""The fields of `KubernetesArguments`."""

from dataclasses import dataclass, field
from typing import Literal

Action = Literal["render", "submit"]
Kind = Literal["trainjob", "pytorchjob", "job"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesFields:
    """What `whet k8s` is asked for, unchecked."""

    action: Action = "render"
    """render prints the manifests. submit creates them in the cluster by kubectl, and prints the kubectl commands that
    show, follow and delete the job. Comes first, with or without its flag."""
    name: str = field(default="", metadata={"required": True})
    """Name of the job and of all that belongs to it: lower-case letters, digits and dashes. Comes after the action,
    with or without its flag."""
    namespace: str | None = None
    """Namespace of the cluster. null: that of the kubeconfig's context."""
    kind: Kind = "trainjob"
    """trainjob: a Kubeflow TrainJob with its TrainingRuntime (Kubeflow Trainer v2). pytorchjob: a Kubeflow PyTorchJob
    (v1), which can be elastic. job: an Indexed Job of Kubernetes itself, for a cluster without Kubeflow."""
    image: str | None = None
    """Container image with whet in it, with a tag or a digest."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. null: the cluster's own choice, by the tag."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace with which a node pulls the image. Repeat it for several."""
    service_account: str | None = None
    """Service account of the pods. Its token is not mounted: training does not talk to the cluster."""
    label: tuple[str, ...] = ()
    """NAME=VALUE: a label of the job and of its pods, such as sidecar.istio.io/inject=false; those of Kueue
    (kueue.x-k8s.io/queue-name=team) are the job's alone. Repeat it for several."""
    annotation: tuple[str, ...] = ()
    """NAME=VALUE: an annotation of the job and of its pods. Repeat it for several."""

    nodes: int = 1
    """Pods of the job. Each gets all the resources below."""
    nproc_per_node: int = 1
    """Processes (ranks) of each pod: one for each NUMA node that the pod's CPUs come from."""
    cpus: str | None = None
    """CPUs of each pod, a whole number. They are requested and are the limit as well, so that the kubelet can give the
    pod CPUs of its own."""
    memory: str | None = None
    """Memory of each pod, such as 64Gi. It is requested and is the limit as well, and includes shared_memory."""
    shared_memory: str = "1Gi"
    """Size of /dev/shm. It is kept in memory and counts against the pod's."""
    ephemeral_storage: str | None = None
    """Space on the node's disk for each pod, such as 20Gi: /tmp, a /cache without a claim, and logs. It is requested
    and is the limit as well. null: what the cluster's defaults grant; a node whose disk fills up evicts the pod."""
    cpus_per_core: int = 1
    """Kubernetes CPUs for each computing thread. 2: on nodes with hyper-threads whose kubelet gives pods CPUs of their
    own (static CPU manager policy), where two CPUs are one physical core."""
    kept_free_cores: int | None = None
    """Threads of each rank that are left out for communication and loader processes. null: 1 if a rank has 8 threads
    or more and is not alone."""
    node_selector: tuple[str, ...] = ()
    """LABEL=VALUE: only nodes with this label run the pods. Repeat it for several."""
    toleration: tuple[str, ...] = ()
    """A taint that the pods tolerate, as kubectl taint writes it: KEY=VALUE:EFFECT, KEY:EFFECT, KEY=VALUE or KEY.
    Repeat it for several."""
    network_interface: str = "eth0"
    """Interface over which the ranks of the pods talk to each other: eth0 in nearly all clusters."""
    run_as_user: int = 1000
    """User and group number that the processes and the files on the volumes get; 0 (root) is refused."""

    max_restarts: int = 10
    """How often the job starts again after a failure; commands of whet then resume from their newest checkpoint. The
    eviction of a job's only pod does not count. In a job of several pods it counts, because the others fail with it."""
    min_nodes: int | None = None
    """Run with as few pods as this when there are not more. Needs kind pytorchjob."""
    max_nodes: int | None = None
    """Grow to as many pods as this. Needs kind pytorchjob."""
    rdzv_backend: Literal["static", "c10d"] | None = None
    """How ranks find each other: at the first pod's address (static), or by torchrun's c10d rendezvous. null: c10d for
    pytorchjob, static for the others."""
    grace_period_s: int = 300
    """Seconds between SIGTERM and SIGKILL when a pod is evicted or deleted. The run uses them to finish its step and
    save a checkpoint, so they must be longer than both."""

    output_claim: str | None = None
    """PersistentVolumeClaim that is mounted at /output, for checkpoints and the trained model. Several pods need one
    with the access mode ReadWriteMany."""
    data_claim: str | None = None
    """PersistentVolumeClaim that is mounted at /data, read-only."""
    cache_claim: str | None = None
    """PersistentVolumeClaim that is mounted at /cache, for downloaded models and data sets (HF_HOME). null: a folder
    that ends with the pod."""

    env: tuple[str, ...] = ()
    """NAME=VALUE: a variable of the processes. Repeat it for several. Secrets are refused here."""
    env_from_secret: tuple[str, ...] = ()
    """NAME=SECRET or NAME=SECRET/KEY: a variable whose value the cluster takes from this Secret; without a key, from
    the key NAME. Repeat it for several."""

    kubeconfig: str | None = None
    """submit: file with the cluster's address and your credentials. null: the one that kubectl uses."""
    context: str | None = None
    """submit: context of that file. null: its current one."""

    command: tuple[str, ...] = ()
    """The command that the ranks run, after `--`."""
