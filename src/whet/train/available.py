"""Finds packages and devices that a run needs and this machine does not have, before data or torch are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.optimizer_names import missing_package
from whet.errors import Problem
from whet.hardware import gpu

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices that exist in containers and under Windows even if the driver lists no GPU."""


def missing(args: TrainingArguments) -> list[Problem]:
    """Return a problem for every package and device that these settings need and that is missing."""
    return [*_packages(args), *_devices(args)]


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
