"""Where a run reads and writes: what of it is not there, found at once and before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import missing_package
from whet.config.ranks import may_be_another_pod, own_launches, resumes_unasked
from whet.config.rules.training import check_output_dir
from whet.data.files.file_bytes import require_file
from whet.errors import ConfigError, OutputError, Problem, WhetError
from whet.hardware import gpu
from whet.jobs.fields import JobFields
from whet.jobs.splits import SPLITS
from whet.models.loading.hub import hub_problem, missing_folder
from whet.store import find, manifest, write
from whet.watch import lock

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments


_MODELS = ("model_name_or_path", "config_name", "tokenizer_name", "teacher_model")
"""Options that name a folder, or a model on the hub."""
_NO_CHECKPOINT = (None, "auto", "no")


def check_places(job: JobFields, args: TrainingArguments) -> list[Problem]:
    """Return everything that is wrong with the model, the output folder, the checkpoint and the files."""
    return [problem for error in _errors(job, args) for problem in error.problems]


def require_places(job: JobFields, args: TrainingArguments) -> None:
    """Raise one error with all that is wrong; its kind, and so the exit code, is that of the first."""
    errors = list(_errors(job, args)) or list(_hub_errors(job))
    if errors:
        raise type(errors[0]).of([problem for error in errors for problem in error.problems])


def may_hold_files(args: TrainingArguments) -> bool:
    """Return whether a run may begin in an output folder that is not empty, as a restart may find it.

    torchrun also starts a run again that was refused for the files of another one: they stay another one's.
    """
    if args.overwrite_output_dir or args.resume_from_checkpoint or not args.do_train:
        return True
    return may_be_started_again_in(Path(args.output_dir))


def may_be_started_again_in(folder: Path) -> bool:
    """Return whether this command may be a restart of one that has begun in this folder."""
    if may_be_another_pod() or not own_launches():
        return resumes_unasked()
    return lock.may_be_of_this_launch(folder)


def _errors(job: JobFields, args: TrainingArguments) -> Iterator[WhetError]:
    """Yield what is wrong: the configuration first, then the place for the output, then what is read."""
    for flag in _MODELS:
        name = getattr(job, flag)
        if name and name.strip() and (problem := missing_folder(name, f"--{flag}")):
            yield ConfigError.of([problem])
    if problems := missing(args):
        yield ConfigError.of(problems)
    yield from _output(args)
    if args.do_train and args.resume_from_checkpoint not in _NO_CHECKPOINT:
        yield from _raised(lambda: find.require_intact(Path(str(args.resume_from_checkpoint)), light=True))
    files = [getattr(job, one.file) for one in SPLITS.values() if getattr(args, one.asked_by)]
    for path in dict.fromkeys(path for path in files if path):
        if not job.dataset_name:
            yield from _raised(lambda path=path: require_file(Path(path)))


def _hub_errors(job: JobFields) -> Iterator[WhetError]:
    """Yield what is to come from a hub that cannot be reached; asked last, as the answer may take seconds."""
    for flag in (*_MODELS, "dataset_name"):
        kind = "dataset" if flag == "dataset_name" else "model"
        name = getattr(job, flag)
        if name and (problem := hub_problem(name, f"--{flag}", kind, job.cache_dir)):
            yield ConfigError.of([problem])


def _output(args: TrainingArguments) -> Iterator[WhetError]:
    if not args.output_dir.strip() or not args.should_save:
        return
    if problem := check_output_dir(args.output_dir, overwrite=True):
        yield OutputError.of([problem])
    elif problem := check_output_dir(args.output_dir, may_hold_files(args)):
        yield ConfigError.of([problem])
    elif args.do_train and (args.save_strategy != "no" or args.enable_jit_checkpoint is not False):
        done, last = _resumed_step(args), args.max_steps if args.max_steps > 0 else None
        yield from _raised(lambda: write.require_free_names(Path(args.output_dir), after=done, last=last))


def _resumed_step(args: TrainingArguments) -> int:
    """Return the step after which the run begins."""
    asked = args.resume_from_checkpoint
    if not asked or asked == "no":
        return 0
    folder = find.would_resume(Path(args.output_dir)) if asked == "auto" else Path(str(asked))
    return (manifest.facts_of(folder) or {}).get("step", 0) if folder else 0


def _raised(check: Callable[[], object]) -> Iterator[WhetError]:
    try:
        check()
    except WhetError as error:
        yield error


_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices that exist in containers and under Windows even if the driver lists no GPU."""


def missing(args: TrainingArguments) -> list[Problem]:
    """Return a problem for every package and device that these settings need and that is missing.

    And for the variables of the environment that ask a tracker for what a run does not send.
    """
    return [*_packages(args), *_asked_of_trackers(args), *_devices(args)]


def _packages(args: TrainingArguments) -> Iterator[Problem]:
    for tracker in args.report_to:
        if find_spec(tracker) is None:
            yield Problem(
                what=f"the package {tracker!r} is missing",
                got=f"--report_to {tracker}",
                why=f"--report_to {tracker} needs it",
                fix=f"run: pip install {tracker}; or leave {tracker} out of --report_to",
            )
    if args.do_train and (problem := missing_package(args.optim)):
        yield problem


def logging_dir_in(args: TrainingArguments, name: str) -> str | None:
    """Return the folder of TensorBoard's files of the seed or trial of this name; None: that in its output folder.

    TensorBoard draws the files of one folder as one run.
    """
    asked = args.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
    return str(Path(asked) / name) if asked and "tensorboard" in args.report_to else None


_NOT_SENT: Mapping[str, Mapping[str, str]] = {
    "wandb": {
        "WANDB_LOG_MODEL": "after the run, upload its folder: wandb artifact put OUT",
        "WANDB_WATCH": "the norm of the gradient is sent at each log entry",
    },
    "mlflow": {"HF_MLFLOW_LOG_ARTIFACTS": "after the run, upload its folder: mlflow artifacts log-artifacts"},
}
"""Tracker -> variables that transformers' callback for it reads and whet does not, and what there is instead."""
_OFF = ("", "FALSE", "0", "NO", "OFF")


def _asked_of_trackers(args: TrainingArguments) -> Iterator[Problem]:
    for tracker in args.report_to:
        for name, instead in _NOT_SENT.get(tracker, {}).items():
            if (asked := os.environ.get(name, "")).upper() not in _OFF:
                yield Problem(
                    what=f"{name} asks for what whet does not send to {tracker}",
                    got=f"{name}={asked}",
                    why="a run sends its settings and the figures of its log",
                    fix=f"unset {name}; {instead}",
                )


def _devices(args: TrainingArguments) -> Iterator[Problem]:
    if (
        args.tf32
        and not args.use_cpu
        and not gpu.nvidia_gpus()
        and not any(Path(path).exists() for path in _NVIDIA_DEVICES)
    ):
        yield Problem(
            what="tf32 is asked for, but this machine has no NVIDIA GPU",
            got="tf32=True",
            why="TF32 is a format of NVIDIA GPUs since Ampere (compute capability 8.0), and would have no effect here",
            fix="leave --tf32 out; --precision auto measures whether bf16 is faster here",
        )
