"""The processes of a choice: what they do, and how the one that chooses starts, asks and ends them.

One forecasts the candidates; others take real steps, each with its own threads, cores, allocator and ranks. All run the
user's command, which finds in the variable `WHET_AUTO` what it is to do, and answers at a socket, a line of JSON each.
They write nothing into the output folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from whet import system
from whet.config.arguments import TrainingArguments
from whet.config.environment import AUTO
from whet.config.ranks import place_or_alone
from whet.config.settings import draft
from whet.errors import WhetError
from whet.hardware import memory
from whet.jobs.task import Task
from whet.launch.picture import ranges
from whet.launch.start import as_preloaded, choose_libraries
from whet.launch.words import without_secrets
from whet.plan import choose
from whet.plan.choose import Candidate, Forecast
from whet.watch import printing, stop

NO_TIME = "no time left"
_ENDS_S = 5.0
_LONGEST_PATH = 107
"""Bytes of the path of a socket, on Linux."""
_LONGEST = 1 << 24


# ---- in them ----


def ordered() -> Mapping[str, Any] | None:
    """Return what the process that started this one wants of it, if it is one of a choice; else None."""
    text = os.environ.get(AUTO)
    return None if text is None else json.loads(text)


def serve(order: Mapping[str, Any], task: Task, job: Any, args: TrainingArguments) -> int:
    """Forecast candidates, or take steps as one of them, and answer at the socket; return the exit code."""
    if place_or_alone().n_ranks == 1 and not system.ending_with(order["parent"])():
        return 0
    system.go_first()  # rather a trial than the process that started it
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(order["at"])
        with end.makefile("rw", encoding="utf-8") as line:
            try:
                (_forecast if order["do"] == "forecast" else _take_steps)(line, order, task, job, args)
            except WhetError as error:
                _answer(line, error="; ".join(filter(None, (error.problems[0].what, error.problems[0].fix))))
            except BrokenPipeError:  # nobody asks any more
                return 0
    return 0


def _answer(line: Any, **facts: Any) -> None:
    line.write(json.dumps(facts) + "\n")
    line.flush()


def _forecast(line: Any, _: Mapping[str, Any], task: Task, job: Any, args: TrainingArguments) -> None:
    """Answer with the forecasts of the ways to split a step, and of those that recompute if memory demands it."""
    from whet.jobs.dry_run import examples_of, forecast, free_for, rates_for
    from whet.plan import rates as known_rates
    from whet.plan import seconds
    from whet.store import weights

    if (device := weights.device_of(args.use_cpu).type) != "cpu":
        _answer(line, device=device)
        return
    free = free_for(args)
    measured = rates_for(lambda text: _answer(line, say=text))
    rates = known_rates.nominal() if measured is None else measured  # the trials measure, and these order them
    examples, base = examples_of(task, job, args), Candidate.of(args)
    first = forecast(task, job, args, free, examples)
    rehearsed: dict[Candidate, Any] = {base: first}

    def look(candidate: Candidate, form: str) -> Forecast:
        if candidate not in rehearsed:
            own = drafted(args, **candidate.settings)
            rehearsed[candidate] = forecast(task, job, own, free, examples, first.held_bytes)
        found, changes = rehearsed[candidate], "precision" in candidate.settings  # without its format it chooses one
        peak = found.memory if changes else found.by_format.get(form, found.memory)
        return timed(candidate, form, peak.peak_bytes)

    def timed(candidate: Candidate, form: str, peak_bytes: int | None = None) -> Forecast:
        anatomy = replace(first.anatomy, checkpointing=candidate.checkpointing, precision=form)
        took = seconds.forecast(rates, anatomy, seconds.split(first.workload, candidate.rows))
        fits = free is None or peak_bytes is None or peak_bytes <= choose.FITS_FRAC * free
        return Forecast(candidate=candidate, step_s=took.step_s, fits=fits, peak_bytes=peak_bytes)

    padded = "" if first.anatomy.packed else "its batches are padded, and dropout follows them"
    why = choose.fixed_split(args) or padded
    sizes = ([(base.rows, base.batches)], []) if why else choose.sizes(base)

    policies = (base.checkpointing,) if args.gradient_checkpointing else (None, *choose.POLICIES)
    known = {
        form: choose.forecasts(base, sizes, policies, partial(look, form=form), partial(timed, form=form))
        for form in dict.fromkeys((args.precision, *first.by_format))
    }
    without = {
        form: [look(choose.without(one, flag), form) for one in tried[:1] for flag in choose.doubtful(args)]
        for form, found in known.items()
        for tried, _ in (choose.in_order(found, base),)
    }
    took = seconds.forecast(rates, first.anatomy, first.workload)
    prices = [] if measured is None else seconds.prices(rates, first.anatomy, first.workload)
    _answer(
        line, device="cpu", free=free, split_is_fixed=why,
        sees_all_rows=first.workload.sees_all_rows,
        train_s=None if measured is None else took.train_s, precision=took.precision,
        prices={price.flag: price.frac for price in prices},
        known={form: [asdict(one) for one in found] for form, found in known.items()},
        without={form: [asdict(one) for one in found] for form, found in without.items()},
    )  # fmt: skip


_OFF: Mapping[str, Any] = {
    "overwrite_output_dir": False, "do_eval": False, "do_predict": False, "resume_from_checkpoint": None,
    "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False, "metric_for_best_model": None,
    "save_strategy": "no", "save_async": False, "enable_jit_checkpoint": False, "logging_strategy": "no",
    "logging_first_step": False, "report_to": (), "profile": False, "disable_tqdm": True, "log_level": "error",
    "lr_scheduler_type": "constant", "lr_scheduler_kwargs": None, "warmup_steps": 0, "warmup_ratio": 0.0,
    "memory_limit_gb": 0.0,
}  # fmt: skip
"""What a trial leaves out, as it belongs to no step."""


def _take_steps(line: Any, order: Mapping[str, Any], task: Task, job: Any, args: TrainingArguments) -> None:
    """Answer which number format the run takes, then how long the steps took that are asked for."""
    import torch

    from whet.engine.prepare import follow_own_switch
    from whet.models.loading.special_tokens import align_special_tokens
    from whet.watch.determinism import deterministic

    candidate = Candidate.from_json(order["candidate"])
    if candidate.cpus:
        system.bind(candidate.cpus)
    args = drafted(args, **candidate.settings, **order["settings"], **_OFF, output_dir=order["folder"])
    engine = task.begin(job, args, {"train": task.examples(job, "train")}).engine
    engine.events.callbacks.clear()
    if args.precision != "auto":
        engine.precision.chosen_in("the trials")  # else it would be timed next to fp32 each time
    align_special_tokens(engine.model, engine.spec.processing_class)
    follow_own_switch(engine.model, engine.args)
    with deterministic(args.full_determinism):
        loop, began_s = engine.new_loop(is_trial=True), time.perf_counter()
        loop.start(None)
        trial_s = time.perf_counter() - began_s

        def take(first: int, n: int) -> float:
            began_s = time.perf_counter()
            for step in range(first, first + n):
                loop.counters.global_step = step % loop.run.plan.n_steps
                loop.take_step()
            return time.perf_counter() - began_s

        _answer(line, precision=engine.precision.name, threads=torch.get_num_threads(), trial_s=trial_s)
        while text := line.readline(_LONGEST):
            asked = json.loads(text)
            _answer(line, seconds=take(asked["first"], asked["n"]), peak=memory.peak_bytes())


def drafted(settings: Any, **changed: Any) -> Any:
    """Return the settings with these changes, which are not a run's: no rule is checked."""
    return draft(type(settings), {one.name: getattr(settings, one.name) for one in fields(settings)} | changed)


# ---- from outside ----


class Lost(Exception):  # noqa: N818 (no fault of the run)
    """A process of a choice has not answered."""


def _short_folder() -> Path:
    """Return a new folder for a socket, whose path may have 107 bytes."""
    folder = tempfile.mkdtemp(prefix="whet-auto-")
    if len(os.fsencode(folder)) + len("/socket") <= _LONGEST_PATH:
        return Path(folder)
    Path(folder).rmdir()
    return Path(tempfile.mkdtemp(prefix="whet-auto-", dir="/tmp"))


class Workshop:
    """Starts the processes of a choice, and ends them; their folder goes with it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self.folder = _short_folder()
        self.listener = socket.socket(socket.AF_UNIX)
        self._there: list[Process] = []

    def __enter__(self) -> Workshop:
        stop.before_exit(self.close)
        try:
            self.listener.bind(str(self.folder / "socket"))
            self.listener.listen(256)
        except OSError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started."""
        for one in self._there:
            one.end(at_once=True)
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, until_s: float, candidate: Candidate, **order: Any) -> Process:
        """Return the processes of a candidate, one for each rank, that have begun; raise Lost if they do not."""
        order |= {
            "at": str(self.folder / "socket"),
            "parent": os.getpid(),
            "folder": str(self.folder / f"out-{len(self._there)}"),
        }
        Path(order["folder"]).mkdir()
        order["candidate"] = asdict(candidate)
        command, environment = started_by(candidate, self._words, str(self.folder / f"logs-{len(self._there)}"))
        environment[AUTO] = json.dumps(order)
        with (self.folder / f"{len(self._there)}.txt").open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 (the command of the user)
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        found = Process(process, Path(output.name))
        self._there.append(found)
        try:
            found.meet(self.listener, candidate.ranks, until_s)
        except Lost:
            found.end(at_once=True)
            raise
        return found


class Process:
    """The process of a candidate, or those of its ranks, which answer one line for each request."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output
        self._ends: list[socket.socket] = []
        self._lines: list[Any] = []

    def meet(self, listener: socket.socket, n: int, until_s: float) -> None:
        """Wait until all of them have connected."""
        listener.settimeout(0.1)
        while len(self._ends) < n:
            with suppress(TimeoutError):
                end, _ = listener.accept()
                self._ends.append(end)
                self._lines.append(end.makefile("rw", encoding="utf-8"))
                continue
            if self._process.poll() is not None:
                raise Lost(self._last_words())
            if time.monotonic() > until_s:
                raise Lost(NO_TIME)

    def ask(self, until_s: float, **asked: Any) -> list[Mapping[str, Any]]:
        """Send the request, and return the answer of each; without one, what they say by themselves."""
        try:
            for line in self._lines if asked else ():
                _answer(line, **asked)
            return [self._answer(number, until_s) for number in range(len(self._lines))]
        except TimeoutError:
            raise Lost(NO_TIME) from None
        except OSError:
            raise Lost(self._last_words()) from None

    def _answer(self, number: int, until_s: float) -> Mapping[str, Any]:
        while True:
            self._ends[number].settimeout(max(until_s - time.monotonic(), 0.05))
            text = self._lines[number].readline(_LONGEST)
            if not text:
                raise Lost(self._last_words())
            found = json.loads(text)
            if "error" in found:
                raise Lost(found["error"])
            if "say" not in found:
                return found
            printing.show([found["say"]])

    def _last_words(self) -> str:
        """Return the last line of its output: why it ended."""
        with suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(_ENDS_S)) < 0:
                return f"killed by {signal.Signals(-code).name}"
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended without an answer"

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def end(self, *, at_once: bool = False) -> None:
        """Let it end, and wait for that."""
        for end in (*self._lines, *self._ends):
            with suppress(OSError):
                end.close()
        if at_once:
            self._process.terminate()  # a launcher stops its ranks, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)
        system.kill_apart(self._process)
        self._process.wait()


def started_by(candidate: Candidate, words: Sequence[str], log_dir: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs these words of whet's as this candidate, and its environment.

    The process binds itself to its CPUs.
    """
    launched = [*_launched(candidate), "--log_dir", log_dir, "--"] if candidate.ranks > 1 else []
    command, held = without_secrets(system.python("-m", "whet", *launched, *words))
    return command, {**os.environ, **_variables(candidate), **held}


def without_auto(candidate: Candidate, task: str, args: TrainingArguments) -> str:
    """Return the command that does the same without --auto, for a shell, the user's other options as dots."""
    words = [f"{name}={shlex.quote(value)}" for name, value in _variables(candidate).items()]
    words += ["taskset", "-c", ranges(candidate.cpus)] if candidate.cpus else []
    words += ["whet", *([*_launched(candidate), "--"] if candidate.ranks > 1 else []), task, "..."]
    for name, value in candidate.changed(args).items():
        if value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return " ".join(words)


def _launched(candidate: Candidate) -> list[str]:
    """Return the words that start the ranks of a candidate; what the user preloads is theirs, too."""
    allocator, openmp = as_preloaded()
    allocator = allocator if candidate.allocator == "default" else candidate.allocator
    return [
        "launch", "--nproc_per_node", str(candidate.ranks), "--memory_allocator", allocator, "--openmp", openmp,
    ]  # fmt: skip


def _variables(candidate: Candidate) -> dict[str, str]:
    """Return the variables that a candidate of one process begins with; `whet launch` sets those of ranks."""
    found: dict[str, str] = {}
    if candidate.ranks == 1 and candidate.allocator != "default":
        library = choose_libraries(candidate.allocator, "default").allocator
        found["LD_PRELOAD"] = ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))
    if candidate.ranks == 1 and candidate.threads is not None:
        found["OMP_NUM_THREADS"] = str(candidate.threads)
    return found
