"""What the ranks in the pods run: a command of whet, a script or a module, and how it continues after a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from whet.config.ranks import Elsewhere, checked_for
from whet.errors import ConfigError
from whet.kubernetes import settings_files
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.inputs import require_file_of_pods, require_mounted
from whet.kubernetes.outputs import require_kept_output
from whet.kubernetes.settings_files import Named
from whet.kubernetes.waiting import require_job_module, require_no_terminal

_STARTS_RANKS = ("launch", "k8s")
"""Commands that start ranks themselves."""
_PRINTS = frozenset({"help", "print_config"})
_READ_HERE = ("deepspeed", "output")
"""Options whose check looks for a file or folder on this machine; the pods have others."""
_WRITTEN = ("output_dir", "logging_dir")
_RESUME = "resume_from_checkpoint"


@dataclass(frozen=True)
class OwnCommands:
    """whet's commands, as far as a plan needs to know them."""

    names: Collection[str]
    ranked: Collection[str]
    """Those that several ranks can run together."""
    resumable: Collection[str]
    """Those that save checkpoints and can resume from them."""
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
    prints = [word for word in words if settings_files.flag(word) in _PRINTS or word == "-h"]
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
    """Return the words of a command of whet, with what makes it resume after a restart."""
    kept, named = settings_files.split(words, ("config", *_READ_HERE))
    read = [file for file in named if file.option != "output"]
    for file in named:
        if file.option == "output":
            require_kept_output(file.option, file.path)
        else:
            require_file_of_pods(file.option, file.path, asked)
    read += [file for config in read if config.option == "config" and config.is_here for file in _within(config, asked)]
    for file in read:
        if file.is_here:
            settings_files.require_no_secret(file)
    absent = [file for file in read if not file.is_here]
    if any(file.option == "config" for file in absent):
        for word, following in pairwise([*words, ""]):
            if settings_files.flag(word) in _WRITTEN:
                require_kept_output(settings_files.flag(word), word.partition("=")[2] or following)
        settings, notes = [], []
    else:
        present = [word for file in read if file.is_here for word in (f"--{file.option}", file.path)]
        without = ["--deepspeed", "null"] if absent else []
        settings, notes = _checked(asked, [*kept, *present, *without], own)
    resumes = any(settings_files.flag(word) == _RESUME for word in words)
    resumes = resumes or any(getattr(one, _RESUME, None) is not None for one in settings)
    started = [*words, *([] if resumes or words[0] not in own.resumable else [f"--{_RESUME}", "auto"])]
    return Program(("-m", "whet", *started), (*(_unchecked(words[0], file) for file in absent), *notes))


def _within(config: Named, asked: KubernetesFields) -> list[Named]:
    """Return the files that a settings file names, if the pods have them."""
    settings_files.require_no_secret(config)
    found = settings_files.named_in(config)
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


def _checked(asked: KubernetesFields, words: Sequence[str], own: OwnCommands) -> tuple[Sequence[object], list[str]]:
    """Return the settings that these words have in the pods, and notes; raises ConfigError as the pods would.

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
    for one in settings:
        require_no_terminal(one)
        require_mounted(one, asked)
        _require_one_process_for_seeds(one, asked)
    return settings, [_needs(has_deepspeed, error) for has_deepspeed, error in refused.items()]


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
