"""What a run shows while it runs: a bar on a terminal, one JSON line per interval everywhere else."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from whet.errors import escape_controls
from whet.strict_json import number_or_null
from whet.train.meter import Meter

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_S = 10.0
_MAIN_FIGURES = ("loss", "accuracy", "exact_match", "exact", "f1")
"""What a person is shown of an evaluation; the log holds all of it."""
_NARROWEST_BAR = 10
_LEFT = "0:00:00"
"""How wide the time left is."""


class JsonLines(TrainerCallback):
    """One JSON line to standard output every ten seconds, and at every entry of the log: for files and machines."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        if time.perf_counter() - self._last_s >= INTERVAL_S:
            self._write(_facts(state, meter))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        self._write({"step": state.global_step, "of": state.max_steps} | logs)

    def _write(self, facts: dict[str, Any]) -> None:
        self._last_s = time.perf_counter()
        sys.stdout.write(json.dumps({name: number_or_null(value) for name, value in facts.items()}) + "\n")
        sys.stdout.flush()


class Bar(TrainerCallback):
    """A rich progress bar: loss, real tokens a second, learning rate, padding avoided, time left.

    On a narrow terminal the figures are left out that matter least; bar, loss and time left always stay whole.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._bar: Any = None
        self._console = console

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        whole = {"no_wrap": True, "overflow": "ellipsis"}
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(**whole)),
            BarColumn(bar_width=None, table_column=Column(min_width=_NARROWEST_BAR, ratio=1)),
            TextColumn("{task.fields[facts]}", table_column=Column(**whole)),
            TextColumn("left", table_column=Column(**whole)),
            TimeRemainingColumn(table_column=Column(**whole, min_width=len(_LEFT))),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=state.max_steps, completed=state.global_step, facts="")
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, *, meter: Meter, **_: Any) -> None:
        fixed = [f"step {state.max_steps}/{state.max_steps}", " " * _NARROWEST_BAR, "left", _LEFT]
        room = self._bar.console.width - sum(len(column) + 1 for column in fixed) - 1
        self._bar.update(self._task, completed=state.global_step, facts=_line(_facts(state, meter), meter, room))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **_: Any) -> None:
        shown = {name: value for name, value in metrics.items() if name.removeprefix("eval_") in _MAIN_FIGURES}
        if self._bar is not None and shown:
            text = "  ".join(f"{escape_controls(name)} {value:.2f}" for name, value in shown.items())
            self._bar.console.print(f"step {state.global_step}: {text}", markup=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def for_this_output(*, bar: bool) -> TrainerCallback:
    """Return the bar for a terminal if one is wanted, JSON lines for anything else."""
    return Bar() if bar and sys.stdout.isatty() else JsonLines()


def _line(now: dict[str, Any], meter: Meter, room: int) -> str:
    """Return the figures for people, as many of the first as there is room for."""
    parts = [
        f"loss {now['loss']:.3f}",
        f"{now['tokens_per_s']:,.0f} tokens/s",
        f"lr {now['learning_rate']:.2e}",
        f"{now['padding_avoided']:.0%} padding avoided",
        f"{timedelta(seconds=int(meter.elapsed_s))} gone",
    ]
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


def _facts(state: Any, meter: Meter) -> dict[str, Any]:
    left = (state.max_steps - state.global_step) * meter.elapsed_s / max(meter.n_steps, 1)
    return {
        "step": state.global_step,
        "of": state.max_steps,
        "epoch": round(state.epoch or 0.0, 3),
        "loss": round(meter.last_loss, 4),
        "learning_rate": meter.learning_rate,
        "tokens_per_s": round(meter.tokens_per_s),
        "padding_avoided": round(meter.padding_avoided_frac, 3),
        "eta_s": round(left, 1),
    } | ({"steps_not_applied": meter.n_skipped} if meter.n_skipped else {})
