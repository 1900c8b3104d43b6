"""`run.jsonl` in the output folder: what a run is, how far it has come and how it ended, one JSON object a line.

`Recorder` appends the lines while the run runs, `read` and `Follower` read them; reading imports neither torch nor
transformers. A run that resumes appends to the file. Each line has `event` and `time`, in seconds since 1970:

- `begin`: the command, the settings and where each came from, the folder that their paths begin at, the machine, the
  model, the data, the number of steps
- `step`: loss, learning rate, speed, memory, time left, and the seconds by part since the last such line: at each log
  entry, and every ten seconds
- `forecast`, once the first steps have shown that the run lasts: its peak memory by part, its time from `begin` on, the
  least and the most of that, and whether the rates of the machine or the pace of these steps gave it
- `evaluating` every ten seconds of an evaluation, `evaluation` with its metrics, `save` with its folder. The step of an
  evaluation is that of the weights: an earlier one than the last, once the best model has been loaded
- `end`: `finished`, `stopped` or `failed`, and the peak memory: of the `run`, or of the `process` if that held as much
  before it. A killed run has no such line.

Numbers that JSON does not have are written as text: NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from whet import system
from whet.config.ranks import here
from whet.config.rules.training import RECORD_NAME
from whet.errors import ConfigError, Problem, WhetError, hide_secrets
from whet.hardware import cpu, memory
from whet.log import logger
from whet.store import find
from whet.strict_json import with_finite_numbers
from whet.version import __version__
from whet.watch import files as output_files
from whet.watch import stop

OTHER_MODEL = "other_model"
"""A fact of the line `begin`: a run only judges, and not the model that the results in its folder were of."""
EVERY_S = 10.0
"""A line is written this often, by a run whose steps are faster."""
LARGEST_BYTES = 50_000_000
"""In a larger file, log entries have no line of their own any more: only those of every ten seconds are added."""
_LONGEST_ERROR = 4000
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OF_SPEED = ("runtime", "samples_per_second", "steps_per_second")
_DETAIL = re.compile("(HasAns|NoAns)_.*|total|best_(exact|f1)(_thresh)?")
"""SQuAD's details of its metrics. A kind of entity may be called total, too: total_f1 is none of these."""


def is_squad_detail(name: str) -> bool:
    """Return whether a metric, named without the prefix of its split, is one of SQuAD's details of another."""
    return _DETAIL.fullmatch(name) is not None


def is_detail(metric: str) -> bool:
    """Return whether a metric is a speed or a detail of another: it is in the files, but not in a line for people."""
    return metric.endswith(_OF_SPEED) or is_squad_detail(metric.partition("_")[2])


# ---- the command of this process ----


@dataclass(frozen=True)
class CommandLine:
    """The command that this process runs."""

    text: str
    """As a shell reads it; secrets masked."""
    sources: Mapping[str, str]
    """Setting -> where its value came from: `command line` or `settings file`."""
    words: Sequence[str] = field(default=(), repr=False)
    """As given after `whet`, secrets among them."""


_running: ContextVar[CommandLine | None] = ContextVar("whet_command", default=None)


@contextmanager
def of_command(command: CommandLine) -> Iterator[None]:
    """Have the runs of the block say that this command started them."""
    token = _running.set(command)
    try:
        yield
    finally:
        _running.reset(token)


def running_command() -> CommandLine | None:
    """Return the command that this process runs; None in a script."""
    return _running.get()


# ---- writing ----


def machine() -> dict[str, Any]:
    """Return what a run computes on, and with which libraries."""
    import torch
    import transformers

    return {
        "processor": cpu.model_name(),
        "cores": cpu.usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.limit_bytes(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class Progress:
    """How far a run has come in this process."""

    n_steps: int
    n_rows: int | None
    n_tokens: int | None
    """Real tokens; None if nobody counts them, as with rows."""
    training_s: float
    """What the steps have taken, without evaluations and saves."""
    left_s: float
    """Seconds until the training is done."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Part of the work -> the seconds that it has taken: data, forward_backward, update, evaluation, saving."""


_NOTHING_YET = Progress(n_steps=0, n_rows=0, n_tokens=0, training_s=0.0, left_s=0.0)


def _working_dir() -> str | None:
    """Return what the relative paths of the settings begin at; None if the folder has been removed."""
    with suppress(OSError):
        return str(Path.cwd())
    return None


class Recorder:
    """Appends the lines of one run in this process. On disk errors lines are lost, after one warning."""

    def __init__(self, folder: str | Path, facts: Mapping[str, Any]) -> None:
        """`facts` are those of the line `begin` that are known before the first step."""
        self._path = Path(folder).absolute() / RECORD_NAME  # the process may change its working directory
        self._facts = {"command": None, "task": None, "data": None, "working_dir": _working_dir()} | dict(facts)
        self._begun = self._warned = False
        self._last_s = time.perf_counter()
        self._began_s: float | None = None
        self._train_s = 0.0
        self._peak_before: int | None = None
        """The most that the process held before the first line."""
        self._before = _NOTHING_YET

    def begin(self, state: Any) -> None:
        """Write the first line of a training, whose counters these are, before its first step."""
        self._write_begin(state.max_steps, state.global_step or None)
        self._began_s = time.perf_counter()
        self._before = _NOTHING_YET

    @property
    def is_due(self) -> bool:
        """Whether the last line is ten seconds old."""
        return time.perf_counter() - self._last_s >= EVERY_S

    def step(self, state: Any, progress: Progress, *, logged: bool = False, **figures: Any) -> bool:
        """Write a line about the steps since the last one, if there were any; return whether one was written.

        `figures` are loss, learning_rate and grad_norm. `logged`: the line is that of a log entry.
        """
        before = self._before
        n_steps = progress.n_steps - before.n_steps
        if not n_steps or (logged and not self.is_due and self._is_large()):
            return False
        seconds = {name: total - before.seconds.get(name, 0.0) for name, total in progress.seconds.items()}
        training_s = max(progress.training_s - before.training_s, 1e-9)
        n_tokens = None if progress.n_tokens is None else progress.n_tokens - (before.n_tokens or 0)
        n_rows = None if progress.n_rows is None else progress.n_rows - (before.n_rows or 0)
        self._before = progress
        self._write(
            "step",
            step=state.global_step, of=state.max_steps, epoch=None if state.epoch is None else round(state.epoch, 4),
            **({"loss": None, "learning_rate": None, "grad_norm": None} | figures),
            tokens_per_s=None if n_tokens is None else round(n_tokens / training_s, 1),
            rows_per_s=None if n_rows is None else round(n_rows / training_s, 3),
            resident_bytes=memory.resident_bytes(),
            eta_s=round(progress.left_s, 3),
            seconds={name: round(value, 4) for name, value in seconds.items()},
        )  # fmt: skip
        return True

    def forecast(self, found: Mapping[str, Any]) -> None:
        """Write what the training is forecast to take, as `engine/forked_forecast.py` has it."""
        self._write("forecast", forecast=dict(found))

    def evaluating(self, step: int, done: int, of: int | None) -> None:
        """Write how far an evaluation has come, in rows or batches."""
        self._write("evaluating", step=step, done=done, of=of)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation or a prediction."""
        self._write("evaluation", step=step, metrics=dict(metrics))

    def save(self, step: int, folder: str) -> None:
        """Write that a checkpoint is complete; `folder` is its name in the output folder."""
        self._write("save", step=step, folder=folder)

    def training_ends(self) -> None:
        """Stop the clock of the training."""
        if self._began_s is not None:
            self._train_s += time.perf_counter() - self._began_s
            self._began_s = None

    def end(self, status: str, *, error: BaseException | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Write the last line: the status is finished, stopped or failed."""
        self.training_ends()
        peak = memory.peak_bytes()
        is_of_run = peak is not None and (self._peak_before is None or peak > self._peak_before)
        self._write(
            "end", status=status, error=None if error is None else _described(error),
            peak_bytes=peak, peak_of="run" if is_of_run else "process",
            train_s=round(self._train_s, 3), metrics=dict(metrics or {}),
        )  # fmt: skip

    @contextmanager
    def ends(self, metrics: Mapping[str, Any]) -> Iterator[None]:
        """Write the last line after the block: how it ended, and the metrics as they are then."""
        try:
            yield
        except BaseException as error:
            is_stop = isinstance(error, stop.Stopped | KeyboardInterrupt)
            self.end("stopped" if is_stop else "failed", error=error, metrics=metrics)
            raise
        self.end("finished", metrics=metrics)

    def _write_begin(self, steps: int | None, resumed_from: int | None) -> None:
        self._begun, self._peak_before = True, memory.peak_bytes()
        self._write(
            "begin", whet=__version__, pid=os.getpid(), host=socket.gethostname(), ranks=here().n_ranks, **self._facts,
            steps=steps, resumed_from=resumed_from,
        )  # fmt: skip

    def _write(self, event: str, **facts: Any) -> None:
        if not self._begun:  # an evaluation without training, or a run that failed before its first step
            self._write_begin(None, None)
        self._last_s = time.perf_counter()
        line = {"event": event, "time": round(time.time(), 3)} | facts
        try:
            self._append(json.dumps(with_finite_numbers(line), ensure_ascii=True, allow_nan=False).encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be written (%s): the run continues without some of its lines", RECORD_NAME, error
                )

    def _append(self, line: bytes) -> None:
        """Append the line in one call, and close the file: a reader on another machine sees it at once over NFS."""
        handle = output_files.open_to_append(self._path)
        try:
            size = os.fstat(handle).st_size
            os.lseek(handle, max(size - 1, 0), os.SEEK_SET)  # what is written is appended wherever this is
            is_cut = os.read(handle, 1) not in (b"", b"\n")  # the process was killed, or the disk was full
            os.write(handle, (b"\n" if is_cut else b"") + line + b"\n")
        finally:
            os.close(handle)

    def _is_large(self) -> bool:
        try:
            return self._path.lstat().st_size > LARGEST_BYTES
        except OSError:
            return False


def _described(error: BaseException) -> str:
    """Return the error in words; those of an error that nobody raised on purpose begin with its class."""
    text = str(error) if isinstance(error, WhetError | stop.Stopped) else f"{type(error).__name__}: {error}"
    return hide_secrets(text)[:_LONGEST_ERROR]


class RunRecorder:
    """The callback of whet's engine that records a run; only rank 0 has one."""

    def __init__(self, recorder: Recorder, *, on_cpu: bool) -> None:
        self._recorder = recorder
        self._on_cpu = on_cpu
        self._meter: Any = None
        self._losses: list[float] = []
        """Of the steps since the last line."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, meter: Any, **_: Any) -> None:
        self._meter, self._losses = meter, []
        self._recorder.begin(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder.is_due:  # the log entries of the step before have been written
            self._step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Any, **_: Any) -> None:
        self._losses.append(meter.last_loss)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:
        if "loss" in logs and self._meter is not None:
            self._step(state, logged=True, loss=logs["loss"])

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, *, n_done: int = 0, n_rows: int | None = None, **_: Any
    ) -> None:
        if self._recorder.is_due:
            self._step(state)
            self._recorder.evaluating(state.global_step, n_done, n_rows)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, Any], **_: Any) -> None:
        self._step(state)
        self._recorder.evaluation(state.global_step, metrics)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, *, folder: Path, **_: Any) -> None:
        self._recorder.save(find.step_of(folder), folder.name)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(state)
        self._recorder.training_ends()
        self._meter = None

    def _step(self, state: Any, *, logged: bool = False, loss: float | None = None) -> None:
        if (meter := self._meter) is None or not self._losses:
            return
        seconds, clock = meter.clock.seconds, meter.clock
        if not self._on_cpu:  # kernels of a GPU run later than the calls that start them
            seconds = {name: value for name, value in seconds.items() if name not in ("forward_backward", "update")}
        progress = Progress(meter.n_steps, meter.n_rows, meter.n_tokens, clock.training_s, clock.left_s, dict(seconds))
        is_written = self._recorder.step(
            state, progress, logged=logged,
            loss=sum(self._losses) / len(self._losses) if loss is None else loss,
            learning_rate=meter.learning_rate, grad_norm=meter.grad_norm,
        )  # fmt: skip
        if is_written:
            self._losses = []


# ---- reading ----


@dataclass(frozen=True, slots=True)
class Step:
    """A line about the steps since the one before; None for what is not known."""

    time: float
    step: int
    of: int | None
    epoch: float | None
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_s: float | None
    rows_per_s: float | None
    resident_bytes: float | None
    eta_s: float | None
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of an evaluation or a prediction."""

    time: float
    step: int
    """That of the weights; of an evaluation `apart`, the last one that was trained."""
    metrics: Mapping[str, Any]
    apart: bool = False
    """Whether its process trained nothing: the model may be that of the last step, or the best one."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that was written."""

    time: float
    step: int
    folder: str


_Kept = TypeVar("_Kept", Step, Evaluation, Save)


@dataclass
class Attempt:
    """What one process wrote, from its first line on."""

    begin: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    forecast: Mapping[str, Any] = field(default_factory=dict)
    """What the training was forecast to take; empty if it was not."""
    evaluating: Mapping[str, Any] | None = None
    """How far the present evaluation is: done and of."""
    end: Mapping[str, Any] | None = None
    """None: the process still runs, or was killed."""
    last: float = 0.0
    """The time of the last line."""

    @property
    def trains(self) -> bool:
        """Whether it has begun to train."""
        return isinstance(self.begin.get("steps"), int)

    @property
    def resumed_from(self) -> int:
        """The step that its training began after."""
        return _whole(self.begin.get("resumed_from")) or 0

    @property
    def train_s(self) -> float:
        """How long it has trained; without an end, up to its last step."""
        if self.end is not None:
            return finite(self.end.get("train_s")) or 0.0
        began, last = finite(self.begin.get("time")), self.steps[-1].time if self.steps else math.nan
        return max(last - began, 0.0) if began is not None and math.isfinite(last) else 0.0

    @property
    def of_rank(self) -> str:
        """Words for whose memory is recorded: those of a run with several ranks, of which only the first records."""
        return " of rank 0" if (_whole(self.begin.get("ranks")) or 1) > 1 else ""

    @property
    def peak_of(self) -> str:
        """Words for what the peak memory of its end is of, unless that is all of the run."""
        of_process = self.end is not None and self.end.get("peak_of") == "process"
        return (" of the process" if of_process else "") + self.of_rank

    def add(self, line: Mapping[str, Any]) -> Step | Evaluation | Save | None:
        """Add a line other than `begin`, and return what it is; every line counts as a sign of life."""
        event, step = line.get("event"), _whole(line.get("step")) or 0
        self.last = _number(line.get("time")) or self.last
        self.evaluating = line if event == "evaluating" else None
        if event == "forecast":
            self.forecast = _mapping(line.get("forecast"))
        if event == "step":
            self.steps.append(_step(line, self.last, step))
            return self.steps[-1]
        if event == "evaluation":
            metrics = _read_numbers(_mapping(line.get("metrics")))
            self.evaluations.append(Evaluation(self.last, step, metrics, apart=not self.trains))
            return self.evaluations[-1]
        if event == "save":
            self.saves.append(Save(self.last, step, str(line.get("folder"))))
            return self.saves[-1]
        if event == "end":
            self.end = {**line, "metrics": _read_numbers(_mapping(line.get("metrics")))}
        return None


@dataclass
class RunRecord:
    """What the file of an output folder says."""

    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
    """All of them: those of an earlier run in this folder too."""

    @property
    def run(self) -> list[Attempt]:
        """The attempts of the newest run: the last that began to train at its first step, and what came after it.

        An attempt that judges another model begins a run, too.
        """
        starts = [
            number
            for number, one in enumerate(self.attempts)
            if (one.trains and one.begin.get("resumed_from") is None) or one.begin.get(OTHER_MODEL)
        ]
        return self.attempts[starts[-1] if starts else 0 :]

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else Attempt()

    @property
    def training(self) -> Attempt:
        """The newest attempt that trained, else the newest one."""
        return next((one for one in reversed(self.run) if one.trains), self.last)

    @property
    def steps(self) -> list[Step]:
        """The steps of the newest run, in order; those that a resumed run took again are there once."""
        return self._kept(lambda attempt, _: attempt.steps)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the newest run, without those of steps that a resumed run took again."""

        def of(attempt: Attempt, last: int) -> list[Evaluation]:
            return [replace(one, step=last) if one.apart else one for one in attempt.evaluations]

        return self._kept(of)

    @property
    def saves(self) -> list[Save]:
        """The checkpoints that the newest run wrote, without those of steps that a resumed run took again."""
        return self._kept(lambda attempt, _: attempt.saves)

    @property
    def trained_s(self) -> float:
        """How long the newest run has trained, in all of its processes; of one without an end, up to its last step."""
        return sum(one.train_s for one in self.run if one.trains)

    def _kept(self, of: Callable[[Attempt, int], list[_Kept]]) -> list[_Kept]:
        """Return what `of` finds in the attempts of the newest run, but for what lies behind the step of a resume.

        It is given an attempt, and the last step that was trained by its end.
        """
        found: list[_Kept] = []
        last = 0
        for attempt in self.run:
            if attempt.trains:
                found = [one for one in found if one.step <= attempt.resumed_from]
                last = max([attempt.resumed_from, *(one.step for one in attempt.steps)])
            found += of(attempt, last)
        return found

    def add(self, line: Mapping[str, Any]) -> Step | Evaluation | Save | None:
        """Add the next line of the file, and return what it is unless it begins or ends something."""
        if line.get("event") == "begin":
            self.attempts.append(Attempt(begin=line, last=_number(line.get("time")) or 0.0))
            return None
        if not self.attempts:  # its first line could not be written
            self.attempts.append(Attempt())
        return self.attempts[-1].add(line)


class Follower:
    """Reads a run's file as it grows."""

    def __init__(self, folder: str | Path) -> None:
        self.record = RunRecord(Path(folder))
        self._offset = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""
        """The beginning of a line that is not complete yet."""

    def update(self) -> list[Step | Evaluation | Save | None]:
        """Read what was appended since the last call, and return what each new line is; damaged ones are skipped.

        The file is opened again each time, which is when NFS asks the server how long it is.
        """
        lines = [found for text in self._new().split(b"\n") if (found := _parsed(text)) is not None]
        return [self.record.add(line) for line in lines]

    def finish(self) -> RunRecord:
        """Read the file to its end, and a last line without a newline if it is complete."""
        self.update()
        if (line := _parsed(self._rest)) is not None:
            self.record.add(line)
            self._rest = b""
        return self.record

    def _new(self) -> bytes:
        """Return the complete lines that were added; of a file that was replaced, all of them."""
        try:
            handle = system.open_plain(self.record.folder / RECORD_NAME, os.O_RDONLY, follow=True)
        except OSError:
            return b""
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return b""
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._file, self._offset, self._rest = (status.st_dev, status.st_ino), 0, b""
                self.record.attempts.clear()
            file.seek(self._offset)
            found = file.read()
        self._offset += len(found)
        complete, newline, self._rest = (self._rest + found).rpartition(b"\n")
        return complete + newline


def read(folder: str | Path) -> RunRecord:
    """Return what the `run.jsonl` of an output folder says; raises ConfigError if no run is recorded there."""
    record = Follower(folder).finish()
    if not record.attempts:
        raise ConfigError.of([no_record(Path(folder))])
    return record


def no_record(folder: Path) -> Problem:
    """Return the problem of a folder without a recorded run."""
    if not folder.exists():
        got, fix = "there is no such folder", "name the --output_dir of a run"
    elif not folder.is_dir():
        got, fix = "it is a file", f"name its folder: {folder.parent}"
    elif (folder / RECORD_NAME).is_file():
        got, fix = (
            f"nothing in its {RECORD_NAME} can be read",
            "ask its owner for the right to read it, or start a run there",
        )
    elif (folder.parent / RECORD_NAME).is_file():
        got, fix = f"it has no {RECORD_NAME}", f"name the output folder around it: {folder.parent}"
    else:
        got, fix = f"it has no {RECORD_NAME}", "name the --output_dir of a run that has begun to train or to evaluate"
    return Problem(
        what="no run is recorded in this folder",
        got=f"{folder}: {got}",
        why=f"whet's commands write {RECORD_NAME} into the output folder, and whet.Trainer does with report_to='whet'",
        fix=fix,
    )


def _parsed(text: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _step(line: Mapping[str, Any], when: float, step: int) -> Step:
    seconds = {
        name: value for name, one in _mapping(line.get("seconds")).items() if (value := _number(one)) is not None
    }
    named = ("epoch", "loss", "learning_rate", "grad_norm", "tokens_per_s", "rows_per_s", "resident_bytes", "eta_s")
    known = {name: _number(line.get(name)) for name in named}
    return Step(time=when, step=step, of=_whole(line.get("of")), seconds=seconds, **known)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in values.items()}


def finite(value: Any) -> float | None:
    """Return the number; None for anything else, and for NaN and the infinities."""
    found = _number(value)
    return found if found is not None and math.isfinite(found) else None


def _number(value: Any) -> float | None:
    """Return the number, which may be NaN or infinite; None for anything else."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
