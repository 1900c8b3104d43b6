"""The plan of a job, which every kind of manifest is made from, and what its ranks run.

That is a command of whet, a script or a module; here stands what of it the pods cannot run, read or write.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from whet.config import deepspeed, secrets
from whet.config.command_line import read_config
from whet.config.environment import LAUNCH, RESUME
from whet.config.ranks import Elsewhere, checked_for
from whet.errors import MASK, ConfigError
from whet.kubernetes.arguments import read_quantity, secret_reference
from whet.kubernetes.fields import Kind, KubernetesFields

PORT = 29500
"""The port at which ranks find each other."""
_KEPT_FREE_FROM = 8
"""Threads of a rank from which one of them is left for communication, as in `whet launch`."""
_TO_END_S = 10
"""Seconds of the grace period that are left after the ranks' own end, for the launcher and the kubelet."""


@dataclass(frozen=True)
class SecretReference:
    """A variable whose value is in a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class JobPlan:
    """What is to run where: the answers that all manifests share."""

    asked: KubernetesFields
    name: str
    kind: Kind
    image: str
    nodes: int
    n_threads: int
    """Computing threads of each rank."""
    cpus: int
    memory: str
    command: tuple[str, ...]
    """What a pod starts."""
    variables: Mapping[str, str]
    secrets: tuple[SecretReference, ...]
    elastic: tuple[int, int]
    """The fewest and the most pods; both are `nodes` for a job of a fixed size."""
    rdzv_backend: str
    notes: tuple[str, ...]
    """What could not be checked on this machine, a line each."""

    @property
    def n_ranks(self) -> int:
        """Ranks of the job with `nodes` pods."""
        return self.nodes * self.asked.nproc_per_node

    @property
    def has_peers(self) -> bool:
        """Whether there can be more than one rank."""
        return self.elastic[1] * self.asked.nproc_per_node > 1

    @property
    def n_failures(self) -> int:
        """Pod failures that the job survives: in each of its restarts all pods fail together."""
        return self.asked.max_restarts * self.elastic[1]


def build_plan(asked: KubernetesFields, own: OwnCommands) -> JobPlan:
    """Return the plan for checked options; raises ConfigError if the command cannot run in the pods."""
    assert asked.image is not None and asked.memory is not None  # noqa: PT018  the rules demand both
    cpus = int(read_quantity(asked.cpus or "") or 0)
    elastic = (asked.min_nodes or asked.nodes, asked.max_nodes or asked.nodes)
    has_peers = elastic[1] * asked.nproc_per_node > 1
    n_threads = threads(asked, cpus, alone=not has_peers)
    runs = program(asked, own)
    references = [reference for pair in asked.env_from_secret if (reference := secret_reference(pair))]
    return JobPlan(
        asked=asked,
        name=asked.name,
        kind=asked.kind,
        image=asked.image,
        nodes=asked.nodes,
        n_threads=n_threads,
        cpus=cpus,
        memory=asked.memory,
        command=_started(asked, runs.words, has_peers=has_peers),
        variables=_variables(asked, n_threads, has_peers=has_peers),
        secrets=tuple(SecretReference(*reference) for reference in references),
        elastic=elastic,
        rdzv_backend=asked.rdzv_backend or ("c10d" if asked.kind == "pytorchjob" else "static"),
        notes=runs.notes,
    )


def threads(asked: KubernetesFields, cpus: int, *, alone: bool) -> int:
    """Return the computing threads of each rank: its cores, less those that are kept free."""
    cores = cpus // asked.cpus_per_core // asked.nproc_per_node
    usual = int(not alone and cores >= _KEPT_FREE_FROM)
    kept_free = usual if asked.kept_free_cores is None else asked.kept_free_cores
    return cores - min(kept_free, cores - 1)


def _started(asked: KubernetesFields, words: tuple[str, ...], *, has_peers: bool) -> tuple[str, ...]:
    """Return the words of a pod's process: torchrun for several ranks, which finds the others by its PET_ variables.

    torchrun does not restart its ranks itself if the rendezvous is static: its store keeps the addresses of the
    attempt before, and the agents do not learn that another pod is new.
    """
    if not has_peers:
        return ("python", *words)
    restarts = asked.max_restarts if asked.kind == "pytorchjob" or asked.rdzv_backend == "c10d" else 0
    return (
        "torchrun",
        f"--nproc_per_node={asked.nproc_per_node}",
        f"--max_restarts={restarts}",
        *words,
    )


def _variables(asked: KubernetesFields, n_threads: int, *, has_peers: bool) -> dict[str, str]:
    """Return the variables of the processes; the user's are the last."""
    found = {
        "OMP_NUM_THREADS": str(n_threads),
        "HF_HOME": f"{CACHE}/huggingface",
        "XDG_CACHE_HOME": CACHE,
        "HOME": TEMPORARY,
        "TMPDIR": TEMPORARY,
        "PYTHONUNBUFFERED": "1",
        RESUME: "auto",  # a pod does not know whether it is the first: the trainings in it look for checkpoints
        LAUNCH: _id_of(asked),
    }
    if has_peers:
        found["GLOO_SOCKET_IFNAME"] = asked.network_interface
        found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(asked.grace_period_s - _TO_END_S)  # else 30 s, then SIGKILL
    return found | dict(pair.split("=", 1) for pair in asked.env)


def _id_of(asked: KubernetesFields) -> str:
    """Return the id of the job: a new one for each that is submitted, and the same whenever one is rendered again."""
    if asked.action == "submit":
        return uuid.uuid4().hex
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:32]


_STARTS_RANKS = ("launch", "k8s")
"""Commands that start ranks themselves."""
_PRINTS = frozenset({"help", "print_config"})
_READ_HERE = ("deepspeed", "output")
"""Options whose check looks for a file or folder on this machine; the pods have others."""


@dataclass(frozen=True)
class OwnCommands:
    """whet's commands, as far as a plan needs to know them."""

    names: Collection[str]
    ranked: Collection[str]
    """Those that several ranks can run together."""
    settings: Callable[[str, Sequence[str]], Sequence[object]]
    """Returns the settings of a command for its words; raises ConfigError as the command would."""


@dataclass(frozen=True)
class Program:
    """What `python` runs in the pods."""

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What could not be checked here, a line each."""


def program(asked: KubernetesFields, own: OwnCommands) -> Program:
    """Return the arguments of `python` in the pods. Raises ConfigError for what a pod could only fail with."""
    words = asked.command[2:] if asked.command[:2] == ("-m", "whet") else asked.command
    first = words[0] if words else "whet"
    if first in own.names:
        _require_training(words, own)
        _require_ranks(asked, first, own)
        return _own_words(asked, words, own)
    if first == "-m" and len(words) > 1:
        require_job_module(words)
        return Program(tuple(words))
    if PurePosixPath(first).suffix == ".py":
        return Program(tuple(words))
    raise ConfigError(
        what="the pods cannot run this command",
        got=first,
        why="it is no command of whet, no Python script and no -m MODULE",
        fix=f"use one of {', '.join(_in_pods(own))}, the path of a script in the image, or -m MODULE",
    )


def _in_pods(own: OwnCommands) -> list[str]:
    return [name for name in own.names if name not in _STARTS_RANKS]


def _require_training(words: Sequence[str], own: OwnCommands) -> None:
    """Refuse commands that start ranks, and words with which a command only prints."""
    if words[0] in _STARTS_RANKS:
        raise ConfigError(
            what=f"whet {words[0]} does not run in the pods",
            got=words[0],
            why="the pods start one rank for each --nproc_per_node themselves, and have no access to the cluster",
            fix=f"put the command of the ranks itself after --, one of {', '.join(_in_pods(own))}",
        )
    prints = [word for word in words if flag(word) in _PRINTS or word == "-h"]
    if prints:
        raise ConfigError(
            what=f"whet {words[0]} {prints[0]} only prints",
            got=prints[0],
            why="the job would end without a model",
            fix=f"run whet {words[0]} {prints[0]} here, and leave it out after --",
        )


def _require_ranks(asked: KubernetesFields, name: str, own: OwnCommands) -> None:
    if name not in own.ranked and _has_peers(asked):
        raise ConfigError(
            what=f"whet {name} runs in one process",
            got=f"several ranks of whet {name}",
            why="each rank would do the complete work again, over the same output folder",
            fix="leave --nodes, --max_nodes and --nproc_per_node out; several ranks can run "
            f"{', '.join(sorted(own.ranked))}, and scripts that use torch.distributed or whet.Trainer",
        )


def _has_peers(asked: KubernetesFields) -> bool:
    return (asked.max_nodes or asked.nodes) * asked.nproc_per_node > 1


def _own_words(asked: KubernetesFields, words: Sequence[str], own: OwnCommands) -> Program:
    """Return the words of a command of whet, once they are checked as far as this machine has their files."""
    kept, named = split(words, ("config", *_READ_HERE))
    read = [file for file in named if file.option != "output"]
    for file in named:
        if file.option == "output":
            require_kept_output(file.option, file.path)
        else:
            require_file_of_pods(file.option, file.path, asked)
    read += [file for config in read if config.option == "config" and config.is_here for file in _within(config, asked)]
    for file in read:
        if file.is_here:
            require_no_secret(file)
    in_image = [*filter(None, (_of_image(file.option, file.path) for file in read))]
    absent = [file for file in read if not file.is_here]
    if any(file.option == "config" for file in absent):
        for word, following in pairwise([*words, ""]):
            if flag(word) in _KEPT:
                require_kept_output(flag(word), word.partition("=")[2] or following)
        notes = []
    else:
        present = [word for file in read if file.is_here for word in (f"--{file.option}", file.path)]
        without = ["--deepspeed", "null"] if absent else []
        notes = _checked(asked, [*kept, *present, *without], own)
    unchecked = [_unchecked(words[0], file) for file in absent]
    return Program(("-m", "whet", *words), tuple(dict.fromkeys((*unchecked, *in_image, *notes))))


def _within(config: Named, asked: KubernetesFields) -> list[Named]:
    """Return the files that a settings file names, if the pods have them."""
    require_no_secret(config)
    found = named_in(config)
    for file in found:
        require_file_of_pods(file.option, file.path, asked)
    return found


def _unchecked(name: str, file: Named) -> str:
    if file.option == "config":
        return (
            f"{file.path} is not on this machine: neither its settings nor the flags next to it were checked. "
            f"whet {name} COPY.yaml --print_config checks a copy"
        )
    return f"{file.path} is not on this machine: the configuration of DeepSpeed in it was not checked"


def _checked(asked: KubernetesFields, words: Sequence[str], own: OwnCommands) -> list[str]:
    """Return notes about the settings that these words have in the pods; raises ConfigError as the pods would.

    The rules see each number of ranks that the job may have. The image may have DeepSpeed or not: only what is wrong
    in both cases is refused.
    """
    pods = sorted({asked.min_nodes or asked.nodes, asked.nodes, asked.max_nodes or asked.nodes})
    settings: Sequence[object] = ()
    refused: dict[bool, ConfigError] = {}
    for n_pods in pods:
        for has_deepspeed in (True, False):
            with checked_for(Elsewhere(n_ranks=n_pods * asked.nproc_per_node, has_deepspeed=has_deepspeed)):
                try:
                    settings = own.settings(words[0], words[1:])
                except ConfigError as error:
                    refused.setdefault(has_deepspeed, error)
    if len(refused) == 2:
        raise refused[True]
    notes = [_needs(has_deepspeed, error) for has_deepspeed, error in refused.items()]
    for one in settings:
        require_no_terminal(one)
        notes += require_mounted(one, asked)
        _require_one_process_for_seeds(one, asked)
    return notes


def _needs(refused_with: bool, error: ConfigError) -> str:
    there = "an image without DeepSpeed" if refused_with else "DeepSpeed in the image"
    return f"these settings need {there}; otherwise: {error.problems[0].what} ({error.problems[0].got})"


def _require_one_process_for_seeds(settings: object, asked: KubernetesFields) -> None:
    n_seeds = getattr(settings, "seeds", 1)
    if n_seeds > 1 and _has_peers(asked):
        raise ConfigError(
            what="--seeds trains its models one after the other, in one process",
            got=f"--seeds {n_seeds} on several ranks",
            why="each rank would train all of them, over the same folders",
            fix="leave --nodes, --max_nodes and --nproc_per_node out, or make one job for each --seed",
        )


DATA = "/data"
_PATHS = ("file", "adapter", "context")
"""Options that never name something on the hub, next to those that end in _file."""
_MAY_BE_HERE = (
    "model_name_or_path", "config_name", "tokenizer_name", "teacher_model", "base_model_name_or_path", "dataset_name",
    "model", "hard_negatives_model",
)  # fmt: skip
"""Options that name a folder or something on the hub: a command takes the folder if there is one."""


def require_mounted(settings: Any, asked: KubernetesFields) -> list[str]:
    """Return notes about paths that the image must have.

    Raises ConfigError if one of the settings names a file or folder that the pods cannot have, or cannot write.
    """
    require_written(settings)
    notes: list[str] = []
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if isinstance(value, str) and value:
            _require_claim(name, value, asked)
            _require_absolute(name, value)
            notes += filter(None, [_of_image(name, value)])
    return notes


def require_file_of_pods(name: str, value: str, asked: KubernetesFields) -> None:
    """Raise ConfigError if this is not a file that the pods have: of a claim, or of the image."""
    _require_claim(name, value, asked)
    _require_absolute(name, value, is_path=True)


def _require_claim(name: str, value: str, asked: KubernetesFields) -> None:
    claims = {DATA: ("data_claim", asked.data_claim)}
    if not name.endswith("_dir"):  # a folder to write to can be in the pod's own /cache
        claims[CACHE] = ("cache_claim", asked.cache_claim)
    for folder, (option, claim) in claims.items():
        if claim is None and PurePosixPath(value).is_relative_to(folder):
            raise ConfigError(
                what=f"{name} is on a volume that the pods do not have",
                got=f"--{name} {value}, without --{option}",
                why=f"{folder} holds files only if a claim is mounted there",
                fix=f"add --{option} CLAIM, the name of the PersistentVolumeClaim with this file, before the --",
            )


def _require_absolute(name: str, value: str, *, is_path: bool = False) -> None:
    """Refuse paths of this machine. A relative name of a model or a data set is one of the hub."""
    if name in (*_KEPT, "cache_dir"):
        return
    file = PurePosixPath(value).name
    if PurePosixPath(value).is_relative_to(TEMPORARY):
        raise ConfigError(
            what=f"{name} is in {TEMPORARY}",
            got=value,
            why=f"{TEMPORARY} of a pod is its own, and empty when it starts",
            fix=f"use --{name} {DATA}/{file} with --data_claim, or --{name} {OUTPUT}/{file} if it is on --output_claim",
        )
    is_path = is_path or name.endswith("_file") or name in _PATHS or value.startswith(("./", "../", "~"))
    is_here = name in _MAY_BE_HERE and _is_here(value)
    if PurePosixPath(value).is_absolute() or not (is_path or is_here):
        return
    on_hub = "; for the one on the hub run whet k8s in another folder" if not is_path else ""
    raise ConfigError(
        what=f"{name} is a relative path" if is_path else f"{name} is a folder of this machine",
        got=value,
        why=f"in the pods it means a path in {OUTPUT}, the working directory, and not one of this machine",
        fix=f"use --{name} {DATA}/{file} with --data_claim, or --{name} {OUTPUT}/{file} if it is on --output_claim"
        + on_hub,
    )


def _is_here(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _of_image(name: str, value: str) -> str | None:
    """Return a note about a path of this machine that the pods have only if their image has it; None for others."""
    mounted = (DATA, str(OUTPUT), CACHE, TEMPORARY)
    if not PurePosixPath(value).is_absolute() or any(PurePosixPath(value).is_relative_to(one) for one in mounted):
        return None
    if not _is_here(value):
        return None
    return f"--{name} {value} is on this machine; the pods have it only if the image does"


OUTPUT = PurePosixPath("/output")
"""Where the claim for checkpoints and models is mounted; also the working directory."""
CACHE = "/cache"
TEMPORARY = "/tmp"  # noqa: S108  a folder of the pod's own
_KEPT = ("output_dir", "logging_dir")
"""Options that name a folder for results."""


def require_written(settings: Any) -> None:
    """Raise ConfigError if a setting names a folder for results that is not on the claim, or cannot be written."""
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if name in _KEPT and value is not None:
            require_kept_output(name, value)
        elif name == "cache_dir" and value is not None:
            _require_writable(name, value)
    if getattr(settings, "overwrite_output_dir", False):
        raise ConfigError(
            what="overwrite_output_dir does not fit a job that resumes",
            got="--overwrite_output_dir",
            why="a pod that starts again resumes from the newest checkpoint, which that option would delete",
            fix="leave --overwrite_output_dir out, and use a new --output_dir for a new run",
        )


def require_kept_output(name: str, value: str) -> None:
    """Raise ConfigError if this folder or file does not lie on the claim for the output."""
    place = OUTPUT / value
    if not place.is_relative_to(OUTPUT) or ".." in place.parts:
        raise ConfigError(
            what=f"{name} is not on the claim for the output",
            got=value,
            why=f"pods can write to {OUTPUT} only, besides folders that end with them",
            fix=f"use --{name} {OUTPUT}/{place.name or 'run'}",
        )


def _require_writable(name: str, value: str) -> None:
    place = OUTPUT / value
    writable = any(place.is_relative_to(folder) for folder in (OUTPUT, CACHE, TEMPORARY))
    if not writable or ".." in place.parts:
        raise ConfigError(
            what=f"{name} cannot be written in the pods",
            got=value,
            why=f"only {OUTPUT}, {CACHE} and {TEMPORARY} can be written; the rest is read-only",
            fix=f"use --{name} {CACHE}/{place.name}, with --cache_claim if the next job is to find it",
        )


_LONE = (".yaml", ".yml", ".json")


class Named(NamedTuple):
    """A file or folder that the words of a command name: the option, and the path in the pods."""

    option: str
    path: str

    @property
    def is_here(self) -> bool:
        """Whether this machine has a file at that path, too."""
        try:
            return Path(self.path).is_file()
        except (OSError, ValueError):
            return False


def split(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[Named]]:
    """Return the words without these options, and what the options name. A file without a flag is one of `config`."""
    kept: list[str] = []
    named: list[Named] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, inline = flag(word), "=" in word
        text = word.partition("=")[2] if inline else next(iter(left), "")
        if name in options and text and not text.lstrip().startswith("{"):
            named.append(Named(name, text))
            left = left if inline else left[1:]
        elif len(kept) == 1 and not name and PurePosixPath(word).suffix in _LONE:
            named.append(Named("config", word))
        else:
            kept.append(word)
    return kept, named


def flag(word: str) -> str:
    """Return the option that a word names; empty if it is no flag."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""


def named_in(config: Named) -> list[Named]:
    """Return DeepSpeed's file if a settings file names one."""
    given = read_config(config.path).get("deepspeed")
    return [Named("deepspeed", given)] if isinstance(given, str) else []


def require_no_secret(file: Named) -> None:
    """Raise ConfigError if a file has a secret in it, before any other error could show the value."""
    found = sorted({secrets.masked(name) for name, value in _pairs(_content(file)) if _is_secret(name, value)})
    if found:
        raise ConfigError(
            what=f"the file of --{file.option} contains a secret in clear",
            got=", ".join(f"{name} {MASK} in {file.path}" for name in found),
            why="everyone who may use the image or the claim with this file could read it",
            fix="remove it from the file; make a Secret from a file that holds only the value, run: kubectl create "
            "secret generic hub --from-file=HF_TOKEN; then use --env_from_secret HF_TOKEN=hub/HF_TOKEN before the -- "
            "(whet reads HF_TOKEN by itself)",
        )


def _content(file: Named) -> Mapping[str, Any]:
    """Return what a file holds; raises ConfigError as the command would in the pod."""
    if file.option == "config":
        return read_config(file.path)
    try:
        return deepspeed.read(file.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            what="the configuration of DeepSpeed cannot be read",
            got=str(error),
            why="--deepspeed names a file that holds one JSON object, in which no key is given twice",
            fix="correct the file: python -m json.tool FILE shows where it is no JSON",
        ) from None


def _pairs(part: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value of a file with the name of its key."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _pairs(value, str(key))
    elif isinstance(part, list):
        for value in part:
            yield from _pairs(value, name)
    else:
        yield name, str(part)


def _is_secret(name: str, value: str) -> bool:
    return bool(secrets.in_variables([f"{name}={value}"]))


_INTERPRETERS = frozenset({"IPython", "asyncio", "bpython", "code", "idlelib", "pdb", "ptpython"})
_SERVERS = frozenset({
    "flask", "gradio", "gunicorn", "http.server", "jupyter", "jupyter_server", "jupyterlab", "notebook", "streamlit",
    "tensorboard", "tensorboard.main", "uvicorn", "vllm.entrypoints.openai.api_server", "xmlrpc.server",
})  # fmt: skip
_LAUNCHERS = frozenset({
    "accelerate", "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner", "torch.backends.xeon.run_cpu",
    "torch.distributed.launch", "torch.distributed.run",
})  # fmt: skip
_INPUTS = ("/dev/stdin", "/dev/tty", "/dev/fd/", "/proc/self/fd/")
_READ = ("context", "file")
"""Options that take - for standard input, next to those that end in _file."""


def require_no_terminal(settings: Any) -> None:
    """Raise ConfigError if a command of whet would read what a person types, or what another program pipes in."""
    if getattr(settings, "chat", False) and not settings.prompts:
        raise ConfigError(
            what="whet generate --chat waits for what you type",
            got="--chat without a prompt",
            why="a pod has no terminal: its standard input is empty, and the job would end without an answer",
            fix="add --prompt TEXT, once for each turn, and see the answers with kubectl logs; or copy the model to "
            "this machine and run: whet generate FOLDER --chat",
        )
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        takes_dash = name in _READ or name.endswith("_file")
        if isinstance(value, str) and (value.startswith(_INPUTS) or (value == "-" and takes_dash)):
            raise ConfigError(
                what=f"{name} is read from standard input",
                got=f"--{name} {value}",
                why="nobody can pipe or type anything into a pod: its standard input is empty",
                fix=f"put it into a file on a claim: --{name} /data/FILE with --data_claim",
            )


def require_job_module(words: Sequence[str]) -> None:
    """Raise ConfigError if `-m MODULE ...` waits for a person or for callers, or starts ranks itself."""
    name = words[1].removesuffix(".__main__")
    shown = f"-m {words[1]}"
    if name in _INTERPRETERS:
        raise ConfigError(
            what=f"{shown} waits for a person",
            got=shown,
            why="a pod has no terminal, and the job would end at once or never",
            fix="put the script itself after --; to look into a pod that runs: kubectl exec -it POD -- bash",
        )
    if name in _SERVERS:
        raise ConfigError(
            what=f"{shown} waits for callers",
            got=shown,
            why="a job ends when its command does; this one would hold its CPUs until somebody deletes it",
            fix="put the command that trains after --; for a server make a Deployment and a Service with kubectl",
        )
    if name in _LAUNCHERS:
        raise ConfigError(
            what=f"{shown} starts ranks itself",
            got=shown,
            why="the pods start one rank for each --nproc_per_node themselves, each with its share of the CPUs",
            fix=f"put {_script(words)} itself after --, and the number of ranks into --nproc_per_node and --nodes",
        )


def _script(words: Sequence[str]) -> str:
    return next((word for word in words[2:] if PurePosixPath(word).suffix == ".py"), "the script")
