"""The learning rate of every step, for every schedule: as the textbook says and as transformers' own Trainer has it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import engine
import whet

_PEAK = 1e-3
_N = 20
"""Steps of every run here."""

Rate = Callable[[int, int], float]
"""(step, steps of warm-up) -> learning rate."""


class Line(nn.Module):
    """y = w x, in as few operations as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.w * x - labels) ** 2).mean()}


def _warm(after: Rate) -> Rate:
    """The rate rises in a line to the peak, then follows `after`."""
    return lambda step, warm: _PEAK * step / warm if step < warm else after(step, warm)


def _progress(step: int, warm: int) -> float:
    return (step - warm) / (_N - warm)


def _polynomial(power: float, end: float) -> Rate:
    return lambda step, warm: end + (_PEAK - end) * (1 - _progress(step, warm)) ** power


_TEXTBOOK: dict[str, tuple[dict[str, Any], Rate]] = {
    "linear": ({}, _warm(lambda step, warm: _PEAK * (1 - _progress(step, warm)))),
    "cosine": ({}, _warm(lambda step, warm: _PEAK * (1 + math.cos(math.pi * _progress(step, warm))) / 2)),
    "cosine in 3 half turns": (
        {"lr_scheduler_kwargs": {"num_cycles": 1.5}},
        _warm(lambda step, warm: _PEAK * (1 + math.cos(3 * math.pi * _progress(step, warm))) / 2),
    ),
    "constant": ({}, lambda step, warm: _PEAK),
    "constant_with_warmup": ({}, _warm(lambda step, warm: _PEAK)),
    "polynomial": ({}, _warm(_polynomial(1.0, 1e-7))),
    "polynomial squared": (
        {"lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}}, _warm(_polynomial(2.0, 1e-4)),
    ),
    "inverse_sqrt": (
        {"lr_scheduler_kwargs": {"timescale": 9}},
        _warm(lambda step, warm: _PEAK / math.sqrt((step - warm + 9) / 9)),
    ),
    "cosine_with_restarts": (
        {"lr_scheduler_kwargs": {"num_cycles": 3}},
        _warm(lambda step, warm: _PEAK * (1 + math.cos(math.pi * (3 * _progress(step, warm) % 1))) / 2),
    ),
    "cosine_with_min_lr": (
        {"lr_scheduler_kwargs": {"min_lr": 1e-4}},
        _warm(lambda step, warm: 1e-4 + (_PEAK - 1e-4) * (1 + math.cos(math.pi * _progress(step, warm))) / 2),
    ),
    "cosine_with_min_lr as a share": (
        {"lr_scheduler_kwargs": {"min_lr_rate": 0.25}},
        _warm(lambda step, warm: _PEAK * (1 + 3 * (1 + math.cos(math.pi * _progress(step, warm))) / 2) / 4),
    ),
    "warmup_stable_decay": (
        {"lr_scheduler_kwargs": {"num_decay_steps": 8, "decay_type": "linear"}},
        _warm(lambda step, warm: _PEAK * min(1.0, (_N - step) / 8)),
    ),
}  # fmt: skip
_WARM_UPS: dict[str, tuple[dict[str, float], int]] = {
    "none": ({}, 0),
    "steps": ({"warmup_steps": 6}, 6),
    "share as steps": ({"warmup_steps": 0.17}, 4),  # 3.4, rounded up
    "ratio": ({"warmup_ratio": 0.3}, 6),
}
_CASES = [
    (schedule, warm_up)
    for schedule in _TEXTBOOK
    for warm_up in _WARM_UPS
    if schedule != "constant" or warm_up == "none"
]


def _rates(library: Any, folder: Path, changes: dict[str, Any]) -> list[float]:
    usual = {
        "output_dir": str(folder), "per_device_train_batch_size": 1, "max_steps": _N, "logging_steps": 1,
        "learning_rate": _PEAK, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = library.TrainingArguments(**(usual | changes))
    rows = [{"x": torch.tensor(1.0), "labels": torch.tensor(0.0)}] * 4
    trainer = library.Trainer(model=Line(), args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def _settings(schedule: str, warm_up: str) -> dict[str, Any]:
    return {"lr_scheduler_type": schedule.split()[0]} | _TEXTBOOK[schedule][0] | _WARM_UPS[warm_up][0]


@pytest.mark.parametrize(("schedule", "warm_up"), _CASES)
def test_rates_match_the_textbook(tmp_path: Path, schedule: str, warm_up: str) -> None:
    rate, n_warm = _TEXTBOOK[schedule][1], _WARM_UPS[warm_up][1]
    found = _rates(engine, tmp_path, _settings(schedule, warm_up))
    assert found == pytest.approx([rate(step, n_warm) for step in range(_N)], rel=1e-9, abs=1e-18)  # float64 roundings


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
@pytest.mark.parametrize(
    ("schedule", "warm_up"), [(s, w) for s, w in _CASES if w == ("none" if s == "constant" else "share as steps")]
)
def test_rates_match_transformers(tmp_path: Path, schedule: str, warm_up: str) -> None:
    """transformers 5 has no warmup_ratio any more: a warmup_steps below 1 took its place."""
    settings = _settings(schedule, warm_up)
    assert _rates(engine, tmp_path / "whet", settings) == _rates(transformers, tmp_path / "theirs", settings)


@pytest.mark.parametrize("name", list(transformers.SchedulerType))
def test_every_schedule_of_transformers_has_its_rates(tmp_path: Path, name: transformers.SchedulerType) -> None:
    """By its enum, with a warm-up where it has one, and an evaluation after each two steps where a metric moves it."""
    kwargs = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "warmup_lr_rate": 0.2},
        "warmup_stable_decay": {"num_decay_steps": 5, "min_lr_ratio": 0.1},
        "reduce_lr_on_plateau": {"factor": 0.5, "patience": 0, "threshold": 0.3},
        "greedy": {"factor": 0.8, "patience": 1, "threshold": 0.3, "max_lr": 2e-3, "min_lr": 1e-5},
    }.get(name.value)  # fmt: skip
    settings: dict[str, Any] = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs}
    settings |= {"warmup_steps": 4} if name.value not in ("constant", "reduce_lr_on_plateau", "greedy") else {}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}  # the one at the start moves nothing
    ours = _rates(engine, tmp_path / "whet", settings | {"precision": "fp32", "optim": "adamw_torch"})
    theirs = _rates(transformers, tmp_path / "theirs", settings | {"optim": "adamw_torch"})
    assert ours == theirs
    if name.value != "constant":
        assert len(set(ours)) > 3


def test_custom_metric_schedule_changes_at_evaluations(tmp_path: Path) -> None:
    """transformers does so by its class; a step without a metric would be a TypeError."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=_PEAK)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.9)
    rows = [{"x": torch.tensor(1.0), "labels": torch.tensor(0.0)}] * 4
    args = engine.TrainingArguments(
        str(tmp_path), max_steps=6, eval_strategy="steps", eval_steps=2, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=1, use_cpu=True,
    )  # fmt: skip
    trainer = engine.Trainer(model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, scheduler))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([_PEAK] * 4 + [_PEAK / 10] * 2)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_strategy"),
        ({"lr_scheduler_type": "greedy"}, "eval_strategy"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr_rate"),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.0, "min_lr_rate": 0.0}},
            "min_lr_rate",
        ),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 9, "decay_type": "square"},
            },
            "1-sqrt",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "warmup_steps": 5}, "no warm-up"),
        (
            {"lr_scheduler_type": "greedy", "eval_strategy": "epoch", "lr_scheduler_kwargs": {"mode": 1}},
            "mode one of min, max",
        ),
    ],
)
def test_schedule_that_cannot_work_is_refused_before_the_run(given: dict[str, Any], wanted: str) -> None:
    with pytest.raises(whet.ConfigError, match=wanted):
        engine.TrainingArguments(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 30}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "lr_scheduler_kwargs": {"factor": 2.0}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "metric_for_best_model": "bleu"},
    ],
)
def test_schedule_that_cannot_work_in_this_run_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(whet.ConfigError, match=r"lr_scheduler_kwargs|metric_for_best_model"):
        _rates(engine, tmp_path, given)


def test_schedule_by_a_rising_metric_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """In transformers it lowers the rate as F1 rises, without a word."""
    given: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "metric_for_best_model": "f1",
    }  # fmt: skip
    engine.TrainingArguments(**given)
    assert '{"mode": "max"}' in caplog.text
    caplog.clear()
    engine.TrainingArguments(**given, lr_scheduler_kwargs={"mode": "max"})
    assert not caplog.records


def test_inverse_sqrt_uses_the_warm_up_as_timescale(tmp_path: Path) -> None:
    found = _rates(engine, tmp_path, {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 4})
    assert found[4:] == pytest.approx([_PEAK * math.sqrt(4 / step) for step in range(4, _N)], rel=1e-9)


def test_schedule_spans_the_steps_of_the_epochs(tmp_path: Path) -> None:
    """2.5 epochs of 4 steps: the last of the 10 steps is taken at a tenth of the peak."""
    found = _rates(engine, tmp_path, {"max_steps": -1, "num_train_epochs": 2.5})
    assert found == pytest.approx([_PEAK * (10 - step) / 10 for step in range(10)], rel=1e-9)


@pytest.mark.parametrize("given", [{"warmup_steps": 0}, {"warmup_ratio": 0.0}])
def test_no_warm_up_starts_at_the_peak(tmp_path: Path, given: dict[str, float]) -> None:
    assert _rates(engine, tmp_path, given)[0] == _PEAK
