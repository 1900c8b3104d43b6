"""Experiment trackers: each gets the run's settings once and every entry of the log history."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.utils.generic import flatten_dict

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.optional import require
from whet.strict_json import jsonable

Write = Callable[[Mapping[str, float], int], None]
Close = Callable[[bool], None]
"""Ends the tracker's run; True: it failed."""
Start = Callable[[TrainingArguments, Mapping[str, Any]], tuple[Write, Close]]
"""Starts the tracker's run, with the settings of the training and those of the model's configuration."""
_PROJECT = "huggingface"
"""The project that transformers uses: runs of its scripts and of whet stand next to each other."""
_GLOBAL_STEP = "train/global_step"
_TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Figures of a complete training, which wandb keeps in the summary of its run."""
_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 500
"""Of one call to MLflow, and characters of a value."""
_TRUE = ("1", "ON", "YES", "TRUE")
_MLFLOW_SWITCHES = ("MLFLOW_NESTED_RUN", "MLFLOW_FLATTEN_PARAMS")


class Tracker(TrainerCallback):
    """Sends the numbers of each log entry to one tracker. Training or an entry starts its run, `close` ends it.

    A run of wandb or MLflow that a script has started is used, and stays open. What a tracker prints goes to standard
    error if standard output has JSON lines.
    """

    def __init__(self, start: Start, *, by_error: bool) -> None:
        self._start, self._by_error = start, by_error
        self._write: Write | None = None
        self._close: Close | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._require_run(args, known.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **known: Any) -> None:
        write = self._require_run(args, known.get("model"))  # an evaluation without training starts one
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        with self._printing():
            write(numbers, state.global_step)

    def close(self, failed: bool = False) -> None:
        """End the tracker's run; as failed, if the tracker supports that."""
        if self._close is not None:
            with self._printing():
                self._close(failed)
            self._write = self._close = None

    def _require_run(self, args: TrainingArguments, model: Any) -> Write:
        if self._write is None:
            of_model = getattr(getattr(model, "config", None), "to_dict", dict)
            with self._printing():
                self._write, self._close = self._start(args, of_model())
        return self._write

    def _printing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.redirect_stdout(sys.stderr) if self._by_error else contextlib.nullcontext()


def build(args: TrainingArguments) -> list[Tracker]:
    """Return a callback for each tracker in `report_to`; raises ConfigError if its package is missing."""
    return [Tracker(_STARTS[name](args), by_error=args.log_format == "json") for name in args.report_to]


def renamed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return figures under the names that transformers gives them: eval/..., test/..., otherwise train/..."""

    def name_of(name: str) -> str:
        for start, split in (("eval_", "eval"), ("test_", "test"), ("predict_", "test")):
            if name.startswith(start):
                return f"{split}/{name.removeprefix(start)}"
        return f"train/{name}"

    return {name_of(name): value for name, value in numbers.items()}


def _tensorboard(_: TrainingArguments) -> Start:
    for module in ("tensorboard", "torch.utils.tensorboard"):  # the second imports all that the first may lack
        require(module, needed_for="--report_to tensorboard", install="tensorboard")

    def start(args: TrainingArguments, config: Mapping[str, Any]) -> tuple[Write, Close]:
        from torch.utils.tensorboard import SummaryWriter

        asked = args.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
        writer = SummaryWriter(str(Path(asked).expanduser()) if asked else _runs_folder(Path(args.output_dir)))
        writer.add_text("args", args.to_json_string())
        if config:
            writer.add_text("model_config", json.dumps(jsonable(config), indent=2))

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name, value in renamed(numbers).items():
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


def _wandb(_: TrainingArguments) -> Start:
    module = require("wandb", needed_for="--report_to wandb", install="wandb")

    def start(args: TrainingArguments, config: Mapping[str, Any]) -> tuple[Write, Close]:
        named = {} if args.run_name is None else {"name": args.run_name}
        own = None if module.run else module.init(project=os.environ.get("WANDB_PROJECT", _PROJECT), **named)
        run = own or module.run
        run.config.update({**config, **args.to_dict()}, allow_val_change=True)
        run.define_metric(_GLOBAL_STEP)
        run.define_metric("*", step_metric=_GLOBAL_STEP, step_sync=True)

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name in numbers.keys() & {*_TOTALS}:
                run.summary[name] = numbers[name]
            others = {name: value for name, value in numbers.items() if name not in _TOTALS}
            run.log(renamed(others) | {_GLOBAL_STEP: step})

        return write, lambda failed: None if own is None else own.finish(exit_code=int(failed))

    return start


def _trackio(_: TrainingArguments) -> Start:
    module = require("trackio", needed_for="--report_to trackio", install="trackio")

    def start(args: TrainingArguments, config: Mapping[str, Any]) -> tuple[Write, Close]:
        module.init(project=_PROJECT, name=args.run_name, config={**jsonable(config), **args.to_dict()})

        def write(numbers: Mapping[str, float], step: int) -> None:
            module.log(renamed(numbers) | {_GLOBAL_STEP: step}, step=step)

        return write, lambda failed: module.finish()

    return start


def _mlflow(_: TrainingArguments) -> Start:
    module = require("mlflow", needed_for="--report_to mlflow", install="mlflow")

    def start(args: TrainingArguments, config: Mapping[str, Any]) -> tuple[Write, Close]:
        nested, flattened = (os.environ.get(name, "").upper() in _TRUE for name in _MLFLOW_SWITCHES)
        starts = module.active_run() is None or nested  # a script may have begun one, which it ends itself
        if starts:
            module.start_run(run_name=args.run_name, nested=nested)
        settings = {**config, **args.to_dict()}
        settings = flatten_dict(settings) if flattened else settings
        values = [(name, str(value)[:_LONGEST_PARAMETER]) for name, value in settings.items()]
        most = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        values = values[: int(most)] if most.isdigit() else values
        for first in range(0, len(values), _MOST_PARAMETERS):
            module.log_params(dict(values[first : first + _MOST_PARAMETERS]))
        if tags := os.environ.get("MLFLOW_TAGS"):
            module.set_tags(json.loads(tags))

        def write(numbers: Mapping[str, float], step: int) -> None:
            module.log_metrics({re.sub(r"[^\w\-. :/]", "_", name): numbers[name] for name in numbers}, step=step)

        return write, lambda failed: module.end_run(status="FAILED" if failed else "FINISHED") if starts else None

    return start


_STARTS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
