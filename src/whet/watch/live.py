"""`whet watch`: how runs of other processes are going, read from their `run.jsonl` while they write it.

On a terminal there is a panel for each run, drawn again every second; a pipe gets a line for each change. Nothing is
written to the folders, and their runs do not notice.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from whet import console, json_output, system
from whet.config.rules.training import RECORD_NAME
from whet.errors import ConfigError, escape_controls
from whet.watch import lock
from whet.watch.record import (
    EVERY_S,
    Evaluation,
    Follower,
    RunRecord,
    Save,
    Step,
    finite,
    is_detail,
    no_record,
)

EACH_S = 1.0
"""Time between two looks at the files."""
QUIET_S = 3 * EVERY_S
"""A run shows no sign of life after this time, or after three times its longest time between two lines."""
_SURE_S = 3.0
"""A run that wrote a line so short ago is there."""
_RESTARTED_WITHIN_S = 10.0
"""A launcher starts a run that fails again: watching ends only so long after that."""
_SHORT = ("step", "time", "loss", "scores")
"""What a panel shows if there is little room."""
_LONGEST_NAME = 40
_MOST_FIGURES, _MOST_LINES = 5, 4
"""Of an evaluation, and of an error."""
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_PARTS = {
    "forward_backward": "forward and backward", "update": "update", "data": "data", "evaluation": "evaluation",
    "saving": "saving",
}  # fmt: skip

Status = Literal["starting", "running", "silent", "finished", "stopped", "failed", "killed"]
_ENDED = ("finished", "stopped", "failed", "killed")
_COLOURS: Mapping[str, str] = {
    "starting": "cyan", "running": "cyan", "silent": "yellow", "finished": "green", "stopped": "yellow",
    "failed": "red", "killed": "red",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """What is known about the process of a run."""

    status: Status
    quiet_s: float = 0.0
    """Since its last line."""
    alive: bool | None = None
    """Whether its process exists; None for one of another machine."""

    @property
    def words(self) -> str:
        """The status for people."""
        if self.status == "silent":
            process = ", but its process is there" if self.alive else ""
            return f"no sign of life for {console.duration(self.quiet_s)}{process}"
        return "killed: its process is gone" if self.status == "killed" else self.status


class Watched:
    """One run that is watched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._follower = folder, Follower(folder)
        self._grew_s: float | None = None
        """When the file grew before our eyes: clocks of two machines may differ."""
        self._held_s = time.monotonic()
        """When a run that has written nothing was seen last."""
        self._first = True
        self.changes: list[Step | Evaluation | Save | None] = []
        """What the lines are that the last look found."""
        self.state = State("starting")

    @property
    def record(self) -> RunRecord:
        """What its file says so far."""
        return self._follower.record

    @property
    def shown(self) -> RunRecord:
        """What of that is of the present run: nothing yet of one that is starting in the folder of an earlier one."""
        return RunRecord(self.folder) if self.state.status == "starting" else self.record

    @property
    def trains(self) -> bool:
        """Whether its newest process has begun to train; one that only judges has no part in the training's times."""
        return self.shown.last.trains

    def look(self) -> None:
        """Read what is new."""
        self.changes = self._follower.update()
        if self.changes and not self._first:
            self._grew_s = time.monotonic()
        self._first = False
        self.state = self._state()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is expected: a run that failed may be started again by its launcher."""
        if self.state.status in ("finished", "stopped"):
            return True
        return self.state.status in _ENDED and self.state.quiet_s >= _RESTARTED_WITHIN_S

    def _state(self) -> State:
        attempt, grew_s = self.record.last, self._grew_s
        quiet_s = max(time.time() - attempt.last, 0.0) if grew_s is None else time.monotonic() - grew_s
        if not self.record.attempts:
            if lock.holder(self.folder) is not None:
                self._held_s = time.monotonic()
                return State("starting", alive=True)
            return State("failed", time.monotonic() - self._held_s, alive=False)
        own = (attempt.begin.get("pid"), attempt.begin.get("host"))
        holder = lock.holder(self.folder) if quiet_s > _SURE_S else own
        if holder not in (None, own, (0, "")):
            return State("starting", alive=True)  # another process, which has written nothing yet
        if attempt.end is not None:
            status = attempt.end.get("status")
            return State(status if status in ("finished", "stopped") else "failed", quiet_s, alive=False)
        is_here = own[1] == socket.gethostname()
        alive = holder is not None or (lock.killed(self.folder) != own and _is_running(own[0])) if is_here else None
        if alive is False:
            return State("killed", quiet_s, alive)
        usual_s = max(QUIET_S, 3 * _longest_gap_s(attempt.steps))
        return State("silent" if quiet_s > usual_s else "running", quiet_s, alive)


def _is_running(number: Any) -> bool | None:
    return system.is_running(number) if isinstance(number, int) else False


def _longest_gap_s(steps: Sequence[Step]) -> float:
    recent = steps[-20:]
    return max((later.time - earlier.time for earlier, later in pairwise(recent)), default=0.0)


# ---- the command ----


def run_watch(folders: Sequence[str], *, once: bool) -> int:
    """Show the runs in these folders until all have ended; with `once`, and in a JSON object, how they are now."""
    shown, runs = Console(highlight=False), _Runs([Path(folder) for folder in dict.fromkeys(folders)])
    runs.look()
    if nothing := [run for run in runs.all if not run.record.attempts and run.state.status != "starting"]:
        raise ConfigError.of([no_record(run.folder) for run in nothing])
    with suppress(KeyboardInterrupt, BrokenPipeError):  # its user, or the reader of the pipe, has seen enough
        if json_output.is_wanted():
            json_output.add(runs=[_facts(run) for run in runs.all])
        elif once:
            shown.print(_picture(runs.all, shown))
        elif console.can_be_drawn_over(sys.stdout) and not shown.is_dumb_terminal:
            _draw(runs, shown)
        else:
            _print_changes(runs)
    return 0


class _Runs:
    """The runs that are watched: one a folder, or each seed in it."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._known: dict[Path, Watched] = {}

    @property
    def all(self) -> list[Watched]:
        return list(self._known.values())

    @property
    def have_ended(self) -> bool:
        """Whether all have; between two seeds the lock of the folder around them says that another one comes."""
        between = any(_members(place) != [place] and lock.holder(place) for place in self._places)
        return not between and all(run.has_ended for run in self.all)

    def look(self) -> None:
        for place in self._places:
            for folder in _members(place) or [place]:
                if folder not in self._known:
                    self._known.pop(place, None)
                    self._known[folder] = Watched(folder)
        for run in self.all:
            run.look()


def _members(place: Path) -> list[Path]:
    """Return the folder if a run is recorded there, or those of its seeds; of both, what was written to last."""
    own = place / RECORD_NAME
    seeds = sorted(place.glob(f"seed-*/{RECORD_NAME}"))
    if own.is_file() and own.stat().st_mtime >= max((one.stat().st_mtime for one in seeds), default=0.0):
        return [place]
    return [one.parent for one in seeds]


def _draw(runs: _Runs, shown: Console) -> None:
    """Draw the runs on the terminal's second screen, which a new size does not spoil; leave the last picture behind."""
    from rich.live import Live

    with Live(console=shown, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(runs.all, shown, height=shown.height), refresh=True)
            if runs.have_ended:
                break
            time.sleep(EACH_S)
            runs.look()
    shown.print(_picture(runs.all, shown))


def _print_changes(runs: _Runs) -> None:
    """Print how each run is, and then a line for each change."""
    statuses: dict[Path, str] = {}
    while True:
        for run in runs.all:
            before, now = statuses.get(run.folder), run.state.status
            changes = [text for found in run.changes if (text := _change(run, found))] if before is not None else []
            for text in changes:
                print(text)
            if before != now or before is None:
                print(_summary(run))
            statuses[run.folder] = now
        sys.stdout.flush()
        if runs.have_ended:
            return
        time.sleep(EACH_S)
        runs.look()


# ---- one run in words ----


def _name(run: Watched) -> str:
    return escape_controls(str(run.folder))


def _summary(run: Watched, most: int | None = None) -> str:
    """Return a run on one line; its name in at most so many characters."""
    name, last, end = _name(run), run.shown.last, run.shown.last.end
    figures = [name if most is None else console.shorten(name, most), run.state.words]
    if last.steps and end is None:
        figures += _figures(last.steps[-1])
    if end is not None:
        figures += [*_metrics(end["metrics"]), *_error(end)[:1]]
    return "  ".join(figures)


def _change(run: Watched, found: Step | Evaluation | Save | None) -> str | None:
    """Return a new line of the file for people; None for one that the status says."""
    if isinstance(found, Step):
        return "  ".join([_name(run), *_figures(found)])
    if isinstance(found, Evaluation):
        return "  ".join([_name(run), f"evaluated{_at(found)}", *_metrics(found.metrics)])
    return f"{_name(run)}  saved {escape_controls(found.folder)}" if isinstance(found, Save) else None


def _at(one: Evaluation) -> str:
    return "" if one.apart else f" at step {one.step:,}"


def _figures(last: Step) -> list[str]:
    figures = [f"step {last.step:,}" + ("" if last.of is None else f"/{last.of:,}")]
    for value, form in ((last.loss, "loss {:.4g}"), (last.learning_rate, "lr {:.2g}"), (_speed(last), "{}")):
        figures += [] if value is None else [form.format(value)]
    eta_s = finite(last.eta_s)
    return figures if eta_s is None else [*figures, f"eta {console.duration(eta_s)}"]


def _speed(last: Step) -> str | None:
    tokens = [] if last.tokens_per_s is None else [f"{last.tokens_per_s:,.0f} tokens/s"]
    rows = [] if last.rows_per_s is None else [f"{last.rows_per_s:,.1f} rows/s"]
    return ", ".join([*tokens, *rows]) or None


def _metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Return the figures of an evaluation that people ask for."""
    texts = []
    for name, value in metrics.items():
        wanted = name.startswith(("eval_", "predict_", "test_")) and not name.endswith(("_samples", "_left_out"))
        if wanted and not is_detail(name) and isinstance(value, int | float):
            texts.append(f"{escape_controls(name.removeprefix('eval_').replace('_', ' '))} {value:.4g}")
    return texts[:_MOST_FIGURES]


def _error(end: Mapping[str, Any]) -> list[str]:
    return [escape_controls(line) for line in str(end.get("error") or "").splitlines() if line.strip()]


def _left(run: Watched) -> str | None:
    """Return the time that is left, less the time since the step whose line says so; None if the steps are done."""
    last = run.shown.last
    if not last.steps or run.state.status in _ENDED:
        return None
    step, eta_s = last.steps[-1], finite(last.steps[-1].eta_s)
    is_done = step.of is not None and step.step >= step.of  # what is left then is an evaluation or a save
    if eta_s is None or (is_done and last.evaluating is not None):
        return None
    since_s = run.state.quiet_s + max(last.last - step.time, 0.0) if run.state.status == "running" else 0.0
    left_s = max(eta_s - since_s, 0.0)
    return None if is_done and not left_s else console.duration(left_s)


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _memory_limit(run: Watched) -> float | None:
    """Return the bytes that the run may use: the machine's, or fewer by `--memory_limit_gb`."""
    begin = run.shown.last.begin
    asked = finite(_object(_object(begin, "settings"), "memory_limit_gb").get("value"))
    known = [finite(_object(begin, "machine").get("memory_bytes")), asked * (1 << 30) if asked else None]
    return min((one for one in known if one is not None), default=None)


# ---- the picture ----


def _picture(runs: Sequence[Watched], shown: Console, height: int | None = None) -> Group:
    """Return a panel for each run; short ones, or one line for each, if the screen has not so many lines."""
    for labels in (None, _SHORT):
        panels = [_panel(run, shown, labels) for run in runs]
        if height is None or sum(len(shown.render_lines(one)) for one in panels) <= height:
            return Group(*panels)
    rows = [_row(run, shown.width) for run in runs]
    left_out = len(rows) - (height or 0)
    if left_out > 0:
        rows = [*rows[: (height or 0) - 1], Text(f"and {left_out + 1} more runs: the window is too small")]
    return Group(*rows)


def _row(run: Watched, width: int) -> Text:
    row = Text(_summary(run, max(width // 3, 8)), style=_COLOURS[run.state.status], no_wrap=True, overflow="ellipsis")
    row.truncate(width, overflow="ellipsis")
    return row


def _panel(run: Watched, shown: Console, labels: Collection[str] | None = None) -> Panel:
    """Return the panel of a run, with these of its lines, or all."""
    state = run.state
    colour = _COLOURS[state.status]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(ratio=1, overflow="fold")
    for label, content in _content(run, shown):
        if labels is None or label in labels:
            grid.add_row(label, content)
    room = max(shown.width - len(state.words) - 9, 8)
    title = Text.assemble((console.shorten(_name(run), room), "bold"), "  ", (state.words, colour))
    return Panel(grid, title=title, title_align="left", border_style=colour, padding=(0, 1))


def _content(run: Watched, shown: Console) -> Iterator[tuple[str, Any]]:
    record, begin = run.shown, run.shown.training.begin
    steps, last, of = record.steps, record.last, finite(begin.get("steps"))
    resumed_from = finite(begin.get("resumed_from"))
    if what := _what(begin):
        yield "run", Text(what)
    if of:
        done = steps[-1].step if steps else resumed_from or 0
        epoch = f", epoch {steps[-1].epoch:.2f}" if steps and steps[-1].epoch is not None else ""
        resumed = "" if resumed_from is None else f", resumed after step {resumed_from:,.0f}"
        yield "step", Text(f"{done:,.0f} of {of:,.0f}, {100 * done // of:.0f}%{epoch}{resumed}")
        yield "", ProgressBar(total=of, completed=min(done, of))
    if (text := _times(run)) is not None:
        yield "time", Text(text)
    if last.evaluating is not None:
        done, total = finite(last.evaluating.get("done")) or 0, finite(last.evaluating.get("of"))
        yield "now", Text(f"evaluating: {done:,.0f}" + (f" of {total:,.0f}" if total else ""))
    if steps:
        yield from _of_steps(run, shown)
    if (text := _memory(run)) is not None:
        yield "memory", Text(text)
    if record.evaluations:
        one = record.evaluations[-1]
        yield "scores", Text(", ".join([*_metrics(one.metrics), *([at.strip()] if (at := _at(one)) else [])]))
    if run.trains and (parts := _shares(steps)):
        yield "spent", Text(parts)
    if record.saves:
        saved = record.saves[-1]
        yield (
            "saved",
            Text(f"{escape_controls(saved.folder)}, {console.duration(max(time.time() - saved.time, 0))} ago"),
        )
    if last.end is not None and (lines := _error(last.end)):
        failed = run.state.status == "failed"
        yield "error" if failed else "note", Text("\n".join(lines[:_MOST_LINES]), style="red" if failed else "")


def _what(begin: Mapping[str, Any]) -> str:
    """Return what the run does: its task, its model and its data."""
    model = _object(begin, "model")
    size, n_rows = finite(model.get("parameters")), finite(_object(begin, "data").get("rows"))
    parts = [console.shorten(str(one), _LONGEST_NAME) for one in (begin.get("task"), model.get("name")) if one]
    parts += [] if size is None else [f"{console.count(size)} parameters"]
    parts += [] if n_rows is None else [console.plural(n_rows, "row")]
    return escape_controls(", ".join(parts))


def _times(run: Watched) -> str | None:
    """Return how long the training has taken, what is left, and what was forecast; of one that judges, how long."""
    record, last, parts = run.shown, run.shown.last, []
    began, is_over = finite(last.begin.get("time")), last.end is not None or run.state.status == "killed"
    taken_s = None if began is None else max((last.last if is_over else time.time()) - began, 0.0)
    if not run.trains:
        return None if taken_s is None else f"for {console.duration(taken_s)}"
    if last.end is None and taken_s is not None:
        earlier_s = sum(one.train_s for one in record.run if one.trains and one is not last)
        parts.append(f"for {console.duration(earlier_s + taken_s)}")
    elif record.trained_s:
        parts.append(f"trained for {console.duration(record.trained_s)}")
    if (left := _left(run)) is not None:
        parts.append(f"{left} left")
    if (expected := finite(last.forecast.get("train_s"))) is not None:
        low, high = finite(last.forecast.get("low")), finite(last.forecast.get("high"))
        between = ""
        if low is not None and high is not None:
            between = f" ({console.duration(low)} to {console.duration(high)})"
        since = " since the resume" if last.resumed_from else ""
        parts.append(f"forecast {console.duration(expected)}{between}{since}")
    return ", ".join(parts) or None


def _of_steps(run: Watched, shown: Console) -> Iterator[tuple[str, Any]]:
    steps = run.shown.steps
    losses = [one.loss for one in steps if one.loss is not None]
    if losses:
        now, room = f"{losses[-1]:.4g}", shown.width - len("memory") - 6
        bars = _BARS if (shown.encoding or "").lower().startswith("utf") else _PLAIN_BARS
        curve = sparkline([one for one in losses if math.isfinite(one)], room - len(now) - 1, bars)
        yield "loss", Text.assemble((now, "" if math.isfinite(losses[-1]) else "bold red"), " ", (curve, "cyan"))
    if not run.shown.last.steps:
        return
    last = run.shown.last.steps[-1]
    rates = [] if last.learning_rate is None else [f"learning rate {last.learning_rate:.3g}"]
    rates += [] if last.grad_norm is None else [f"gradient norm {last.grad_norm:.3g}"]
    if rates:
        yield "rate", Text(", ".join(rates))
    if (speed := _speed(last)) is not None:
        yield "speed", Text(speed)


def _memory(run: Watched) -> str | None:
    """Return the memory that the run holds, or held at most, of what it may, and the forecast of that."""
    last, limit = run.shown.last, _memory_limit(run)
    peak = None if last.end is None else finite(last.end.get("peak_bytes"))
    held = finite(last.steps[-1].resident_bytes) if last.steps else None
    if (used := held if peak is None else peak) is None:
        return None
    parts = [console.amount(used) + (f" of {console.amount(limit)}" if limit else "") + (" at most" if peak else "")]
    parts += [of.strip()] if (of := last.peak_of if peak else last.of_rank) else []
    if (forecast := finite(last.forecast.get("peak_bytes"))) is not None:
        parts.append(f"forecast {console.amount(forecast)}")
    return ", ".join(parts)


def _shares(steps: Sequence[Step]) -> str:
    """Return how the time of the steps was spent, the largest part first."""
    sums = {name: sum(one.seconds.get(name, 0.0) for one in steps) for name in _PARTS}
    total = sum(sums.values())
    if not total:
        return ""
    shares = sorted(((value / total, name) for name, value in sums.items() if value / total >= 0.005), reverse=True)
    return ", ".join(f"{_PARTS[name]} {share:.0%}" for share, name in shares)


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return the curve in at most `width` characters, each of which is the mean of some of the values."""
    if not values or width < 1:
        return ""
    n_points = min(width, len(values))
    edges = [number * len(values) // n_points for number in range(n_points + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return bars[0] * n_points
    return "".join(bars[round((one - low) / (high - low) * (len(bars) - 1))] for one in means)


def _facts(run: Watched) -> dict[str, Any]:
    """Return what `--json` prints of a run."""
    record, state = run.shown, run.state
    begin, steps, end = record.training.begin, record.steps, record.last.end
    of_training = ("step", "of", "epoch", "loss", "learning_rate", "grad_norm")
    of_process = ("tokens_per_s", "rows_per_s", "resident_bytes", "eta_s")
    found_in = {of_training: steps, of_process: record.last.steps}
    model = begin.get("model")
    evaluation = record.evaluations[-1] if record.evaluations else None
    found = {
        "folder": str(run.folder), "status": state.status, "quiet_s": round(state.quiet_s, 1), "alive": state.alive,
        "host": record.last.begin.get("host"), "pid": record.last.begin.get("pid"), "task": begin.get("task"),
        "model": model.get("name") if isinstance(model, dict) else None, "steps": begin.get("steps"),
        **{name: getattr(one[-1], name) if one else None for names, one in found_in.items() for name in names},
        "memory_limit_bytes": _memory_limit(run), "forecast": dict(record.last.forecast) or None,
        "evaluation": None if evaluation is None else {
            "step": None if evaluation.apart else evaluation.step, "metrics": evaluation.metrics
        },
        "saved": record.saves[-1].folder if record.saves else None,
        "error": None if end is None else end.get("error"),
        "metrics": {} if end is None else end.get("metrics"),
    }  # fmt: skip
    return _strict(found)


def _strict(value: Any) -> Any:
    """Return the value without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
