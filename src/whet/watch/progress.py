"""Shows the progress of a run: one live line on a terminal, a line for each interval everywhere else."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from whet import console
from whet.errors import escape_controls
from whet.strict_json import jsonable, number_or_null
from whet.watch import printing
from whet.watch.meter import Meter
from whet.watch.record import is_detail

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_S = 30.0
"""A line is written this often if there are no log entries."""
JSON_INTERVAL_S = 10.0
_NARROWEST_BAR = 10


class JsonLines(TrainerCallback):
    """One JSON line on standard output for every log entry and every ten seconds, for programs."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        if time.perf_counter() - self._last_s >= JSON_INTERVAL_S:
            self._write(_facts(state, meter))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        self._write({"step": state.global_step, "of": state.max_steps} | logs)

    def _write(self, facts: dict[str, Any]) -> None:
        self._last_s = time.perf_counter()
        sys.stdout.write(json.dumps({name: number_or_null(jsonable(value)) for name, value in facts.items()}) + "\n")
        sys.stdout.flush()


class Lines(TrainerCallback):
    """A line of text for every log entry, and after half a minute without one."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self._meter: Meter | None = None
        self._trains = False
        self._losses: list[float] = []
        """Of the steps since the last line."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, meter: Meter | None = None, **_: Any) -> None:
        self._meter, self._last_s, self._trains, self._losses = meter, time.perf_counter(), True, []

    def on_step_begin(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        """Write the line of the last step; only now is it known that no log entry has shown that step."""
        if self._losses and time.perf_counter() - self._last_s >= INTERVAL_S:
            loss = round(sum(self._losses) / len(self._losses), 4)
            self._write(step_line(state, _facts(state, meter) | {"loss": loss}, console.width()))

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        self._losses.append(meter.last_loss)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        if not _in_table(self._trains) and (lines := log_lines(state, logs, self._meter, console.width())):
            self._write("\n".join(lines))

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, *, n_done: int = 0, n_rows: int | None = None, **_: Any
    ) -> None:
        if time.perf_counter() - self._last_s >= INTERVAL_S:
            self._write(f"evaluating {n_done:,}" + (f"/{n_rows:,} rows" if n_rows else " rows"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trains = False

    def _write(self, text: str) -> None:
        self._last_s, self._losses = time.perf_counter(), []
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class Bar(TrainerCallback):
    """One live line on a terminal: step, bar, loss, real tokens a second, time left.

    A narrow terminal shows fewer figures, but always the bar and the time left.
    """

    def __init__(self, screen: Console | None = None) -> None:
        self._bar: Any = None
        self._screen = screen
        self._trains = False
        self._last: tuple[list[str], str] = [], ""
        """The figures of the last step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trains = True
        self._start("step", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        now = _facts(state, meter)
        figures = [f"loss {now['loss']:.3f}", f"{now['tokens_per_s']:,} tokens/s", f"lr {now['learning_rate']:.2e}"]
        figures.append(f"{now['padding_avoided']:.0%} padding avoided")
        self._last = figures, f"eta {console.duration(now['eta_s'])}"
        self._show(state.global_step, *self._last)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, *, n_done: int = 0, n_rows: int | None = None, **_: Any
    ) -> None:
        if self._trains:
            of = f"/{n_rows:,}" if n_rows else ""
            self._show(state.global_step, [f"evaluating {n_done:,}{of} rows"], "")
            return
        if self._bar is None:
            self._start("evaluating", n_rows)
        self._show(n_done, [], "")
        if n_done == n_rows:
            self._stop()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs or _in_table(self._trains):
            return
        if self._trains and self._bar is not None:
            self._show(state.global_step, *self._last)
        lines = log_lines(state, logs, None, self._bar.console.width if self._bar is not None else console.width())
        for line in lines:
            if self._bar is None:
                print(line)
            else:
                self._bar.console.print(line, markup=False, highlight=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trains = False
        self._stop()

    def _start(self, what: str, total: int | None, done: int = 0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._stop()
        one_line = {"no_wrap": True, "overflow": "ellipsis"}
        of = f"/{total}" if total else ""
        self._bar = Progress(
            TextColumn(what + " {task.completed:.0f}" + of, table_column=Column(**one_line)),
            BarColumn(bar_width=None, table_column=Column(min_width=_NARROWEST_BAR, ratio=1)),
            TextColumn("{task.fields[facts]}", table_column=Column(**one_line), markup=False),
            console=self._screen,
            expand=True,
            transient=what != "step",
        )
        self._room = self._bar.console.width - 2 * len(of) - len(what) - _NARROWEST_BAR - 4
        self._task = self._bar.add_task(what, total=total, completed=done, facts="")
        self._bar.start()

    def _show(self, done: int, figures: list[str], last: str) -> None:
        """Show as many of the figures as fit, and always `last`."""
        room = self._room - (len(last) + 2 if last else 0)
        shown = console.fit(figures, room, "  ") if room > 0 else ""
        self._bar.update(self._task, completed=done, facts="  ".join(part for part in (shown, last) if part))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


SHOWS: tuple[type, ...] = (Bar, Lines, JsonLines)
"""The callbacks that show a run; without one of them a Trainer prints nothing."""


def for_this_output(*, bar: bool, form: str = "text") -> TrainerCallback:
    """Return the live line for a terminal if one is wanted, else lines of this form: text, json."""
    if form == "json":
        return JsonLines()
    return Bar() if bar and console.can_be_drawn_over(sys.stdout) else Lines()


def _in_table(trains: bool) -> bool:
    """Return whether the figures of an entry are shown in the table at the end of the run instead."""
    return not trains and printing.table_follows()


def log_lines(state: Any, logs: Mapping[str, Any], meter: Meter | None, width: int) -> list[str]:
    """Return an entry of the log for people; none for the figures of a complete training, which its table shows."""
    if "train_runtime" in logs:
        return []
    if "loss" in logs:
        now = _facts(state, meter) if meter is not None else {}
        return step_line(state, now | dict(logs), width).splitlines()
    shown = {name: value for name, value in logs.items() if name != "epoch" and not is_detail(name)}
    where = f"step {state.global_step}/{state.max_steps}" if state.max_steps else "evaluation"
    return console.folded([where, *(f"{escape_controls(str(n))} {_figure(v)}" for n, v in shown.items())], width)


def step_line(state: Any, now: Mapping[str, Any], width: int) -> str:
    """Return the line of a step: whet's figures first, then those that the user's code added."""
    parts = [f"step {state.global_step}/{state.max_steps}"]
    known = {
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.4g}",
        "learning_rate": "lr {:.2g}",
        "tokens_per_s": "{:,} tokens/s",
    }
    parts += [form.format(float(now[name]) if name != "tokens_per_s" else now[name]) for name, form in known.items()
              if isinstance(now.get(name), int | float)]  # fmt: skip
    if "eta_s" in now:
        parts.append(f"eta {console.duration(now['eta_s'])}")
    if now.get("steps_not_applied"):
        parts.append(f"{now['steps_not_applied']} not applied")
    own = {*known, "eta_s", "step", "of", "padding_avoided", "steps_not_applied", "grad_norm"}
    parts += [f"{escape_controls(str(name))} {_figure(value)}" for name, value in now.items() if name not in own]
    return "\n".join(console.folded(parts, width))


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape_controls(str(value))


def _facts(state: Any, meter: Meter) -> dict[str, Any]:
    return {
        "step": state.global_step,
        "of": state.max_steps,
        "epoch": round(state.epoch or 0.0, 3),
        "loss": round(meter.last_loss, 4) if math.isfinite(meter.last_loss) else meter.last_loss,
        "learning_rate": meter.learning_rate,
        "tokens_per_s": round(meter.tokens_per_s),
        "padding_avoided": round(meter.padding_avoided_frac, 3),
        "eta_s": round(meter.clock.left_s, 1),
    } | ({"steps_not_applied": meter.n_skipped} if meter.n_skipped else {})
