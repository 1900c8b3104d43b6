"""`whet.RecordCallback`: records a training of a transformers Trainer in run.jsonl, and writes report.html at its end.

It is a callback like those of transformers' integrations, and reads what callbacks are given. whet.Trainer makes one
for `report_to="whet"`; transformers' own Trainer takes one in `callbacks`.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from whet import report
from whet.config.secrets import hidden, in_variables
from whet.engine.run import Interval
from whet.errors import MASK, hide_secrets
from whet.log import logger
from whet.store import best
from whet.store.weights import count_weights
from whet.strict_json import jsonable
from whet.watch import record, stop
from whet.watch.meter import Ahead, Clock

NAME = "whet"
"""Its name in `report_to`."""


class RecordCallback(TrainerCallback):
    """Records a training in `run.jsonl` of its output folder, for `whet watch` and `whet report`; rank 0 writes.

    `report_html`: write `report.html` next to it when the training ends, and after each evaluation that follows.
    `facts` are added to what the record begins with. `recorder` is that of a run that does more than train: it knows
    what the record begins with, and writes the last line and the report after that.
    """

    def __init__(
        self, report_html: bool = True, facts: Mapping[str, Any] | None = None, recorder: record.Recorder | None = None
    ) -> None:
        self._report_html, self._added, self._of_run = report_html, dict(facts or {}), recorder
        self.count_rows: Callable[[], int] | None = None
        """Returns the rows that this process has trained on; None: nobody counts them, and batches may be small."""
        self._recorder: record.Recorder | None = None
        self._clock = Clock()
        self._trains = False
        self._weights_step: int | None = None
        """The step whose weights a training has ended with; None while it runs, and before one."""
        self._marked_s = 0.0
        self._first = self._first_row = self._first_token = self._n_predicted = 0
        """What there was of each before this training."""
        self._metrics: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if not state.is_world_process_zero:
            return
        rows = getattr(known.get("train_dataloader"), "dataset", None)
        self._recorder = self._of_run or record.Recorder(
            args.output_dir, _facts(args, known.get("model"), rows) | self._added
        )
        self._clock = Clock(lambda: _ahead(args, state))
        self._trains, self._weights_step, self._metrics = True, None, {}
        self._first, self._first_token = state.global_step, state.num_input_tokens_seen
        self._first_row = 0 if self.count_rows is None else self.count_rows()
        self._recorder.begin(state)
        self._mark()

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self._recorder is None:
            return
        self._clock.begin_step()
        self._add("data")
        if self._recorder.is_due:
            groups = getattr(known.get("optimizer"), "param_groups", None)
            self._step(args, state, learning_rate=groups[0]["lr"] if groups else None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("forward_backward")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("update")
        self._clock.end_step(0)
        self._metrics.clear()  # those of an evaluation before this step are of another model
        if state.global_step == self._first + 1 and self._recorder is not None:
            report.remove(Path(args.output_dir))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:
        if "loss" in logs:
            figures = {name: logs.get(name) for name in ("loss", "learning_rate", "grad_norm")}
            self._step(args, state, logged=True, **figures)
        elif "train_runtime" in logs:
            self._metrics.update(logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._n_predicted += 1
        if self._recorder is not None and self._recorder.is_due:
            batches: Any = known.get("eval_dataloader")
            n_batches = len(batches) if has_length(batches) else None
            self._recorder.evaluating(self._weights_step or state.global_step, self._n_predicted, n_batches)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, Any], **_: Any) -> None:
        self._n_predicted = 0
        self._add("evaluation")
        if self._recorder is None:
            return
        self._recorder.evaluation(self._weights_step or state.global_step, metrics)
        self._metrics.update(metrics)
        if not self._trains:
            self._end(args, "finished")

    def on_predict(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, Any], **known: Any) -> None:
        self.on_evaluate(args, state, control, metrics=metrics, **known)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("saving")
        if self._recorder is not None:
            self._recorder.save(state.global_step, f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(args, state)
        self._trains, self._weights_step = False, best.step_of_weights(args, state)
        self._end(args, "finished")

    @contextmanager
    def ending(self, args: Any) -> Iterator[None]:
        """Record how a training within the block ends if it raises; transformers does not tell its callbacks."""
        try:
            yield
        except BaseException as error:
            if self._trains:
                self._trains = False
                is_stop = isinstance(error, stop.Stopped | KeyboardInterrupt)
                self._end(args, "stopped" if is_stop else "failed", error)
            raise

    def _end(self, args: Any, status: str, error: BaseException | None = None) -> None:
        if self._recorder is None:
            return
        self._recorder.training_ends()
        if self._of_run is not None:
            return
        self._recorder.end(status, error=error, metrics=self._metrics)
        if self._report_html and status != "stopped":
            try:
                report.write([args.output_dir])
            except Exception as failed:
                logger.warning("%s: report.html was not written: %s", args.output_dir, failed)

    def _mark(self) -> float:
        """Return the seconds since the last mark."""
        before, self._marked_s = self._marked_s, time.perf_counter()
        return self._marked_s - before

    def _add(self, part: str) -> None:
        """Count the time since the last event that ended a part for this one."""
        self._clock.add(part, self._mark())

    def _step(self, args: Any, state: Any, *, logged: bool = False, **figures: Any) -> None:
        if self._recorder is None:
            return
        n_steps, seconds = state.global_step - self._first, self._clock.seconds
        if args.device.type != "cpu":  # kernels of a GPU run later than the calls that start them
            seconds = {name: value for name, value in seconds.items() if name not in ("forward_backward", "update")}
        n_rows = None if self.count_rows is None else self.count_rows() - self._first_row
        counts_real = getattr(args, "include_num_input_tokens_seen", None) == "non_padding"  # "all": with padding
        n_tokens = (state.num_input_tokens_seen - self._first_token or None) if counts_real else None
        progress = record.Progress(
            n_steps, n_rows, n_tokens, self._clock.training_s, self._clock.left_s, dict(seconds)
        )  # fmt: skip
        self._recorder.step(state, progress, logged=logged, **figures)


def _ahead(args: Any, state: Any) -> Ahead:
    """Return what a training has left, as far as its settings say."""
    n_epoch = math.ceil(state.max_steps / max(state.num_train_epochs, 1))
    pauses = {
        "evaluation": (args.eval_strategy, state.eval_steps),
        "saving": (args.save_strategy, state.save_steps),
    }
    every = {
        kind: {"epoch": n_epoch, "steps": steps}.get(str(getattr(strategy, "value", strategy)), 0)
        for kind, (strategy, steps) in pauses.items()
    }
    done = state.global_step
    left = {kind: Interval("steps", int(n or 0)).times_left(done, state.max_steps) for kind, n in every.items()}
    return Ahead(state.max_steps - done, pauses=left)


def _facts(args: Any, model: Any, rows: Any) -> dict[str, Any]:
    """Return what the record of a training begins with."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    return {
        "command": hide_secrets(shlex.join(hidden(["python", *sys.argv])[0])),
        "settings": _settings(args),
        "machine": record.machine(),
        "model": {
            "name": name or type(model).__name__,
            "parameters": count_weights(model),
            "trainable": count_weights(model, trained=True),
        },
        "data": {"rows": len(rows) if isinstance(rows, Sized) else None, "tokens": None},
    }


def _settings(args: Any) -> dict[str, Any]:
    """Return every field of the arguments: its value, secrets masked, and `from` if it is not the default."""
    found = {}
    for one in fields(args):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        value = getattr(args, one.name, None)
        shown = jsonable(getattr(value, "value", value))
        text = isinstance(shown, str)
        if text and in_variables([f"{one.name}={shown}"]):
            shown = MASK
        found[one.name] = {"value": hide_secrets(shown) if text else shown}
        found[one.name] |= {} if value == default else {"from": "script"}
    return found
