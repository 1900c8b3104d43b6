"""What the ranks in the pods run: a command of whet, a script or a module, and how it continues after a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from whet.errors import ConfigError
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.inputs import require_file_of_pods, require_mounted
from whet.kubernetes.outputs import require_kept_output

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
    resumable: Collection[str]
    """Those that save checkpoints and can resume from them."""
    settings: Callable[[str, Sequence[str]], Sequence[object]]
    """Returns the settings of a command for its words; raises ConfigError as the command would."""


def program(asked: KubernetesFields, own: OwnCommands) -> tuple[str, ...]:
    """Return the arguments of `python` in the pods. Raises ConfigError for what a pod could only fail with."""
    words = asked.command[2:] if asked.command[:2] == ("-m", "whet") else asked.command
    first = words[0] if words else "whet"
    if first in own.names:
        _require_training(words, own)
        _require_ranks(asked, first, own)
        return ("-m", "whet", *_own_words(asked, words, own))
    if (first == "-m" and len(words) > 1) or PurePosixPath(first).suffix == ".py":
        return tuple(words)
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
    prints = [word for word in words if _flag(word) in _PRINTS or word == "-h"]
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


def _own_words(asked: KubernetesFields, words: Sequence[str], own: OwnCommands) -> list[str]:
    """Return the words of a command of whet, with what makes it resume after a restart."""
    checked, files = _without_files(words)
    for name, value in files:
        if name == "output":
            require_kept_output(name, value)
        else:
            require_file_of_pods(name, value, asked)
    if any(name == "config" for name, _ in files):
        for word, following in pairwise([*words, ""]):
            if _flag(word) in ("output_dir", "logging_dir"):
                require_kept_output(_flag(word), word.partition("=")[2] or following)
    else:
        for settings in own.settings(words[0], checked[1:]):
            require_mounted(settings, asked)
            _require_one_process_for_seeds(settings, asked)
    resumes = any(_flag(word) == "resume_from_checkpoint" for word in words)
    return [*words, *([] if resumes or words[0] not in own.resumable else ["--resume_from_checkpoint", "auto"])]


def _require_one_process_for_seeds(settings: object, asked: KubernetesFields) -> None:
    n_seeds = getattr(settings, "seeds", 1)
    if n_seeds > 1 and _has_peers(asked):
        raise ConfigError(
            what="--seeds trains its models one after the other, in one process",
            got=f"--seeds {n_seeds} on several ranks",
            why="each rank would train all of them, over the same folders",
            fix="leave --nodes, --max_nodes and --nproc_per_node out, or make one job for each --seed",
        )


def _without_files(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the words that can be checked here, and the options that name a file which only the pods have.

    A settings file lies in the image or on a claim as well.
    """
    kept: list[str] = []
    files: list[tuple[str, str]] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, inline = _flag(word), "=" in word
        text = word.partition("=")[2] if inline else next(iter(left), "")
        if name in (*_READ_HERE, "config") and text and not text.lstrip().startswith("{"):
            files.append((name, text))
            left = left if inline else left[1:]
        elif len(kept) == 1 and not name and PurePosixPath(word).suffix in (".yaml", ".yml", ".json"):
            files.append(("config", word))
        else:
            kept.append(word)
    return kept, files


def _flag(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""
