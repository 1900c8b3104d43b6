"""Experiment trackers: each gets the run's settings once and every entry of the log history."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.optional import require

Write = Callable[[Mapping[str, float], int], None]
Close = Callable[[bool], None]
"""Ends the tracker's run; True: it failed."""


class Tracker(TrainerCallback):
    """Sends the numbers of each log entry to one tracker. Training or an entry starts its run, `close` ends it."""

    def __init__(self, start: Callable[[TrainingArguments], tuple[Write, Close]]) -> None:
        self._start = start
        self._write: Write | None = None
        self._close: Close | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._write is None:
            self._write, self._close = self._start(args)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:
        if self._write is None:  # an evaluation without training
            self._write, self._close = self._start(args)
        numbers = {renamed(name): float(value) for name, value in logs.items() if isinstance(value, int | float)}
        self._write(numbers, state.global_step)

    def close(self, failed: bool = False) -> None:
        """End the tracker's run; as failed, if the tracker supports that."""
        if self._close is not None:
            self._close(failed)
            self._write = self._close = None


def build(args: TrainingArguments) -> list[Tracker]:
    """Return a callback for each tracker in `report_to`; raises ConfigError if its package is missing."""
    return [Tracker(_STARTS[name](args)) for name in args.report_to]


def renamed(name: str) -> str:
    """Return the name of a figure in the tracker, as in transformers: eval/..., test/..., otherwise train/..."""
    for split in ("eval_", "test_"):
        if name.startswith(split):
            return f"{split[:-1]}/{name.removeprefix(split)}"
    return f"train/{name}"


def _tensorboard(_: TrainingArguments) -> Callable[[TrainingArguments], tuple[Write, Close]]:
    for module in ("tensorboard", "torch.utils.tensorboard"):  # the second imports all that the first may lack
        require(module, needed_for="--report_to tensorboard", install="tensorboard")

    def start(args: TrainingArguments) -> tuple[Write, Close]:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.logging_dir or _runs_folder(Path(args.output_dir)))
        writer.add_text("args", args.to_json_string())

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return write, lambda failed: writer.close()

    return start


def _runs_folder(output_dir: Path) -> str:
    """Return the folder of TensorBoard's files; a link there is refused, as it leads out of the output folder."""
    folder = output_dir / "runs"
    if folder.is_symlink():
        raise ConfigError(
            what="the folder of TensorBoard's files is a link",
            got=f"{folder} -> {folder.readlink()}",
            why="nothing is written through a link in the output folder",
            fix=f"remove {folder}, or name the folder that it leads to in --logging_dir",
        )
    return str(folder)


def _wandb_like(package: str) -> Callable[[TrainingArguments], Callable[[TrainingArguments], tuple[Write, Close]]]:
    """Return the builder for wandb, and for trackio, which has the same interface."""

    def build_one(_: TrainingArguments) -> Callable[[TrainingArguments], tuple[Write, Close]]:
        module = require(package, needed_for=f"--report_to {package}", install=package)

        def start(args: TrainingArguments) -> tuple[Write, Close]:
            chosen = package == "wandb" and os.environ.get("WANDB_PROJECT")  # wandb reads it by itself
            project = {} if chosen else {"project": "whet"}
            module.init(**project, name=args.run_name, config=args.to_dict())

            def close(failed: bool) -> None:
                module.finish(**({"exit_code": int(failed)} if package == "wandb" else {}))

            return lambda numbers, step: module.log(dict(numbers), step=step), close

        return start

    return build_one


def _mlflow(_: TrainingArguments) -> Callable[[TrainingArguments], tuple[Write, Close]]:
    module = require("mlflow", needed_for="--report_to mlflow", install="mlflow")

    def start(args: TrainingArguments) -> tuple[Write, Close]:
        module.start_run(run_name=args.run_name)
        module.log_params({name: str(value)[:500] for name, value in args.to_dict().items()})

        def close(failed: bool) -> None:
            module.end_run(status="FAILED" if failed else "FINISHED")

        return lambda numbers, step: module.log_metrics(dict(numbers), step=step), close

    return start


_STARTS = {
    "tensorboard": _tensorboard,
    "wandb": _wandb_like("wandb"),
    "trackio": _wandb_like("trackio"),
    "mlflow": _mlflow,
}
