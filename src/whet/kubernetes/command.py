"""What the ranks in the pods run: a command of whet, a script or a module, and how it continues after a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.inputs import OUTPUT, require_mounted


@dataclass(frozen=True)
class OwnCommands:
    """whet's commands, as far as a plan needs to know them."""

    names: Collection[str]
    resumable: Collection[str]
    """Those that save checkpoints and can resume from them."""
    settings: Callable[[str, Sequence[str]], Sequence[object]]
    """Returns the settings of a command for its words; raises ConfigError as the command would."""


def program(asked: KubernetesFields, own: OwnCommands) -> tuple[str, ...]:
    """Return the arguments of `python` in the pods. Raises ConfigError for what a pod could only fail with."""
    words = asked.command
    first = words[0]
    if first in own.names:
        return ("-m", "whet", *_own_words(asked, own))
    if (first == "-m" and len(words) > 1) or PurePosixPath(first).suffix == ".py":
        return tuple(words)
    raise ConfigError(
        what="the pods cannot run this command",
        got=first,
        why="it is no command of whet, no Python script and no -m MODULE",
        fix=f"use one of {', '.join(own.names)}, the path of a script in the image, or -m MODULE",
    )


def _own_words(asked: KubernetesFields, own: OwnCommands) -> list[str]:
    """Return the words of a command of whet, with what makes it resume after a restart."""
    words = asked.command
    if not _reads_files(words):
        for settings in own.settings(words[0], words[1:]):
            if isinstance(settings, TrainingArguments):
                _require_kept_output(settings)
            require_mounted(settings, asked)
    resumes = any(_flag(word) == "resume_from_checkpoint" for word in words)
    return [*words, *([] if resumes or words[0] not in own.resumable else ["--resume_from_checkpoint", "auto"])]


def _flag(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""


def _reads_files(words: Sequence[str]) -> bool:
    """Return whether settings come from files: those lie in the image or on a claim, and cannot be read here."""
    first = PurePosixPath(words[1]).suffix if len(words) > 1 else ""
    return first in (".yaml", ".yml", ".json") or any(_flag(word) == "config" for word in words)


def _require_kept_output(args: TrainingArguments) -> None:
    folder = OUTPUT / args.output_dir
    if not folder.is_relative_to(OUTPUT) or ".." in folder.parts:
        raise ConfigError(
            what="output_dir is not on the claim for the output",
            got=args.output_dir,
            why=f"pods can write to {OUTPUT} only, besides folders that end with them",
            fix=f"use --output_dir {OUTPUT}/{folder.name or 'run'}",
        )
    if args.overwrite_output_dir:
        raise ConfigError(
            what="overwrite_output_dir does not fit a job that resumes",
            got="--overwrite_output_dir",
            why="a pod that starts again resumes from the newest checkpoint, which that option would delete",
            fix="leave --overwrite_output_dir out, and use a new --output_dir for a new run",
        )
