"""Finds packages and devices that a run needs and this machine does not have, before data or torch are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from whet.errors import Problem
from whet.hardware import gpu
from whet.optional import extra

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_OPTIMIZERS = {
    "adamw_bnb_8bit": ("bitsandbytes", extra("bitsandbytes")),
    "adamw_8bit": ("bitsandbytes", extra("bitsandbytes")),
    "adamw_torch_8bit": ("torchao", extra("torchao")),
    "adamw_torch_4bit": ("torchao", extra("torchao")),
}
"""Optimizers of other packages -> the package, and how to install it."""
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices that exist in containers and under Windows even if the driver lists no GPU."""


def missing(args: TrainingArguments) -> list[Problem]:
    """Return a problem for every package and device that these settings need and that is missing."""
    return [*_packages(args), *_devices(args)]


def _packages(args: TrainingArguments) -> Iterator[Problem]:
    for tracker in args.report_to:
        if find_spec(tracker) is None:
            yield _package(tracker, f"--report_to {tracker}", tracker, f"leave {tracker} out of --report_to")
    if args.optim in _OPTIMIZERS and args.do_train:
        package, install = _OPTIMIZERS[args.optim]
        if find_spec(package) is None:
            yield _package(package, f"--optim {args.optim}", install, "use --optim adamw_whet_8bit, which needs none")
    if args.optim == "adamw_apex_fused" and args.do_train and find_spec("apex") is None:
        yield Problem(
            what="the package 'apex' is missing",
            got="adamw_apex_fused",
            why="--optim adamw_apex_fused is apex's FusedAdam, which needs a GPU and must be built from source",
            fix="use --optim adamw_torch_fused, which computes the same in one pass too",
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


def _package(name: str, needed_for: str, install: str, instead: str) -> Problem:
    return Problem(
        what=f"the package {name!r} is missing",
        got=needed_for,
        why=f"{needed_for} needs it",
        fix=f"run: pip install {install}; or {instead}",
    )
