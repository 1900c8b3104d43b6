"""Callbacks with the methods of transformers' TrainerCallback: told everything, and their wishes are honoured."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_runs import Recorder, checkpoints, entries, losing_metrics, toy_rows, toy_trainer
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainerControl

from whet.watch import progress

Wish = Callable[[TrainerControl], None]


class Wisher(TrainerCallback):
    """Sets a flag at the end of step 2 of the run."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 2:
            setattr(control, self.flag, True)


def _run(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    """Two epochs of three steps."""
    trainer = toy_trainer(folder, callbacks=callbacks, **({"num_train_epochs": 2} | changes))
    trainer.train()
    return trainer


def test_events_come_in_the_order_of_transformers(tmp_path: Path) -> None:
    seen = Recorder()
    _run(tmp_path, seen, max_steps=4, logging_steps=2, eval_strategy="epoch", save_strategy="epoch")
    assert seen.events == [
        ("train_begin", 0), ("epoch_begin", 0), ("step_begin", 0), ("step_end", 1), ("step_begin", 1), ("step_end", 2),
        ("log", 2), ("step_begin", 2), ("step_end", 3), ("epoch_end", 3), ("log", 3), ("evaluate", 3), ("save", 3),
        ("epoch_begin", 3), ("step_begin", 3), ("step_end", 4), ("epoch_end", 4), ("log", 4), ("log", 4),
        ("evaluate", 4), ("save", 4), ("log", 4), ("train_end", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "event", ["on_init_end", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_predict"]
)
def test_no_event_is_dropped_in_silence(tmp_path: Path, event: str) -> None:
    """A callback that waits for an event gets it, as from transformers' Trainer, or is refused."""
    seen: list[str] = []
    callback = type("Waits", (TrainerCallback,), {event: lambda self, *_, **__: seen.append(event)})
    trainer = _run(tmp_path, callback, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer.predict(toy_rows(4))
    assert seen


def test_callbacks_may_be_classes_and_objects(tmp_path: Path) -> None:
    made: list[Recorder] = []

    class Counted(Recorder):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    _run(tmp_path, Counted, Counted())
    assert len(made) == 2
    assert made[0].events == made[1].events != []


def test_callbacks_see_model_optimizer_and_schedule(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            seen.update(known, args=args, state=state)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen["logs"] = logs

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            seen["metrics"] = metrics

    trainer = _run(tmp_path, Looks, eval_strategy="epoch")
    assert seen["model"] is trainer.model
    assert seen["optimizer"] is trainer.optimizer
    assert seen["lr_scheduler"] is trainer.lr_scheduler
    assert (seen["args"], seen["state"]) == (trainer.args, trainer.state)
    assert seen["state"].is_world_process_zero
    assert "eval_loss" in seen["metrics"]
    assert {"train_loss", "epoch"} <= seen["logs"].keys()


def test_a_wish_to_log(tmp_path: Path) -> None:
    assert [step for step, _ in entries(_run(tmp_path, Wisher("should_log")), "loss")] == [2]


def test_a_wish_to_evaluate(tmp_path: Path) -> None:
    assert [step for step, _ in entries(_run(tmp_path, Wisher("should_evaluate")), "eval_loss")] == [2]


def test_a_wish_to_save(tmp_path: Path) -> None:
    _run(tmp_path, Wisher("should_save"))
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_a_wish_to_stop(tmp_path: Path) -> None:
    seen = Recorder()
    trainer = _run(tmp_path, Wisher("should_training_stop"), seen)
    assert trainer.state.global_step == 2
    assert seen.events[-1] == ("train_end", 2)


def test_a_wish_to_leave_the_epoch(tmp_path: Path) -> None:
    """As in transformers, the next epoch begins at once: steps 3 to 5 are the second epoch, and the run is over."""
    seen = Recorder()
    _run(tmp_path, Wisher("should_epoch_stop"), seen)
    assert seen.steps("epoch_end") == [2, 5]


def test_a_wish_made_by_returning_another_control(tmp_path: Path) -> None:
    class Returns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> TrainerControl:
            return TrainerControl(should_training_stop=state.global_step == 4)

    assert _run(tmp_path, Returns).state.global_step == 4


def test_early_stopping_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    trainer = _run(
        tmp_path, EarlyStoppingCallback(early_stopping_patience=2), num_train_epochs=5, metric_for_best_model="score",
        compute_metrics=losing_metrics([0.1, 0.5, 0.4, 0.3, 0.2]),
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
    )  # fmt: skip
    assert trainer.state.global_step == 4 * 3
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.5, 2 * 3)


def test_early_stopping_by_a_loss_that_falls_runs_to_the_end(tmp_path: Path) -> None:
    trainer = _run(
        tmp_path, EarlyStoppingCallback(1), num_train_epochs=4, metric_for_best_model="score", greater_is_better=False,
        compute_metrics=losing_metrics([4, 3, 2, 1]), eval_strategy="epoch",
    )  # fmt: skip
    assert trainer.state.global_step == 4 * 3


def test_a_callback_of_transformers_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, PrinterCallback, logging_steps=6)
    assert "{'loss': " in capsys.readouterr().out


def test_callbacks_hear_of_the_end_when_training_fails(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise RuntimeError("no more")

    seen = Recorder()
    with pytest.raises(RuntimeError, match="no more"):
        _run(tmp_path, seen, Fails)
    assert seen.events[-1] == ("train_end", 1)


def test_json_lines_are_the_entries_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON line an entry, and nothing else on standard output."""
    trainer = _run(tmp_path, logging_steps=3, log_format="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    history = [{name: value for name, value in entry.items() if name != "step"} for entry in trainer.state.log_history]
    assert [(line.pop("step"), line.pop("of")) for line in lines] == [(3, 6), (6, 6), (6, 6)]
    assert lines == history


def test_long_silences_are_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to log, a line still comes every INTERVAL_S seconds: speed, loss and the time left."""
    monkeypatch.setattr(progress, "JSON_INTERVAL_S", 0.0)
    _run(tmp_path, log_format="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert {"epoch", "loss", "learning_rate", "tokens_per_s", "padding_avoided", "eta_s"} <= lines[0].keys()
    assert lines[5]["eta_s"] == 0.0


def test_a_step_has_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a line is due at the step of a log entry, the entry is it."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    _run(tmp_path, logging_steps=2)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert shown == [f"{step}/6" for step in range(1, 7)]


def test_a_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _run(tmp_path, eval_strategy="epoch")
    shown = capsys.readouterr().out
    assert "6/6" in shown
    assert "eval_loss" in shown


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (50, ["loss"], ["tokens/s", "lr ", "padding"]),
        (80, ["loss", "tokens/s", "lr "], ["padding"]),
        (120, ["loss", "tokens/s", "lr ", "padding avoided"], []),
    ],
)
def test_a_bar_fits_its_terminal(tmp_path: Path, columns: int, shown: list[str], left_out: list[str]) -> None:
    """The bar is a bar, and the time left is whole: figures that matter less make room."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=columns, color_system=None, legacy_windows=False)
    _run(tmp_path, progress.Bar(console), learning_rate=4e-5)
    last = next(line for line in reversed(re.split(r"[\r\n]+", screen.getvalue())) if "step 6/6" in line)
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)
    assert len(line) <= columns
    assert line.count("\N{BOX DRAWINGS HEAVY HORIZONTAL}") >= 10
    assert re.search(r"eta \d+s$", line.rstrip()), line
    assert [part for part in (*shown, *left_out) if part in line] == shown


@pytest.mark.parametrize("kind", [nn.Module, object])
def test_a_callback_needs_only_the_methods_it_has(tmp_path: Path, kind: type) -> None:
    """No base class is asked for."""
    seen: list[int] = []

    class Plain(kind):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    _run(tmp_path, Plain)
    assert seen == [1, 2, 3, 4, 5, 6]
