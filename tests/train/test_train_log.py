"""The log history: entries as transformers' own Trainer writes them for the same run."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_runs import Toy, arguments, span_rows, tiny_bert, toy_rows

import engine

_LOSS = {"loss": float, "grad_norm": float, "learning_rate": float, "epoch": float, "step": int}
_EVALUATION = {
    "eval_loss": float, "eval_runtime": float, "eval_samples_per_second": float, "eval_steps_per_second": float,
    "epoch": float, "step": int,
}  # fmt: skip
_END = {
    "train_runtime": float, "train_samples_per_second": float, "train_steps_per_second": float, "total_flos": float,
    "train_loss": float, "epoch": float, "step": int,
}  # fmt: skip
_RUNS: dict[str, dict[str, Any]] = {
    "by steps": {"num_train_epochs": 1.5, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3},
    "by epochs": {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"},
    "by epochs, the last one cut short": {
        "num_train_epochs": 1.5, "logging_strategy": "epoch", "eval_strategy": "epoch",
    },
    "by shares of the run": {"max_steps": 7, "logging_steps": 0.3, "eval_strategy": "steps", "eval_steps": 0.5},
    "not evaluated at the last step": {"max_steps": 5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2},
    "evaluated before": {"max_steps": 2, "eval_strategy": "epoch", "eval_on_start": True, "logging_first_step": True},
    "accumulated": {"num_train_epochs": 2, "logging_steps": 1, "gradient_accumulation_steps": 3},
    "other schedule": {
        "max_steps": 6, "logging_steps": 1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        "max_grad_norm": 0.1,
    },
}  # fmt: skip


def _history(library: Any, folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The log history of a run over 21 rows (24 where batches are accumulated), 4 a batch, in their order.

    Where accumulated batches differ in size transformers takes the mean of their means for such a model, and whet the
    mean over their rows; and it counts epochs in batches, whet in steps: so here each step has as many of one size.
    """
    args = library.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, train_sampling_strategy="sequential", use_cpu=True,
        learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True, **changes,
    )  # fmt: skip
    rows = toy_rows(24 if "gradient_accumulation_steps" in changes else 21)
    trainer = library.Trainer(model=Toy(), args=args, train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    return trainer.state.log_history


def _kind(entry: dict[str, Any]) -> str:
    return next(name for name in ("train_loss", "eval_loss", "loss") if name in entry)


def _assert_holds(entry: dict[str, Any], wanted: dict[str, type], *, more: bool = False) -> None:
    assert {name: type(entry[name]) for name in wanted} == wanted
    assert more or entry.keys() == wanted.keys()


def test_every_entry_holds_what_transformers_writes(tmp_path: Path) -> None:
    """Of transformers 5.23. The last entry may say more: real tokens a second, padding avoided."""
    *during, last = _history(engine, tmp_path, _RUNS["by steps"])
    for entry in during:
        _assert_holds(entry, _LOSS if "loss" in entry else _EVALUATION)
    assert [entry["step"] for entry in during if "loss" in entry] == [2, 4, 6, 8]
    assert [entry["step"] for entry in during if "eval_loss" in entry] == [3, 6, 9]
    _assert_holds(last, _END, more=True)


def test_a_loss_entry_is_the_mean_since_the_one_before(tmp_path: Path) -> None:
    each = _history(engine, tmp_path, {"max_steps": 6, "logging_steps": 1})
    thirds = _history(engine, tmp_path, {"max_steps": 6, "logging_steps": 3})
    losses = [entry["loss"] for entry in each if "loss" in entry]
    assert [entry["loss"] for entry in thirds if "loss" in entry] == [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert each[-1]["train_loss"] == pytest.approx(sum(losses) / 6, rel=1e-12)


def test_the_floating_point_operations_of_a_model_are_counted(tmp_path: Path) -> None:
    """6 for each weight and token (forward 2, backward 4), embeddings left out."""
    rows, model = span_rows(), tiny_bert()
    trainer = engine.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows)
    trainer.train()
    n_tokens = sum(len(row["input_ids"]) for row in rows)
    wanted = 6 * n_tokens * model.num_parameters(exclude_embeddings=True)
    assert trainer.state.log_history[-1]["total_flos"] == wanted


class _Slow(transformers.TrainerCallback):
    """Takes a moment for each evaluation."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.1)


def test_tokens_a_second_are_those_of_the_steps(tmp_path: Path) -> None:
    """Neither evaluations count nor what comes before the first step, such as a pass of the reference of DPO."""
    rows, args = span_rows(), arguments(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=12)
    trainer = engine.Trainer(tiny_bert(), args, train_dataset=rows, eval_dataset=rows, callbacks=[_Slow()])
    trainer.spec = replace(trainer.spec, before_steps=lambda _: time.sleep(0.3))
    began_s = time.perf_counter()
    metrics = trainer.train().metrics
    assert time.perf_counter() - began_s > metrics["train_runtime"] + 0.3
    n_tokens = sum(len(row["input_ids"]) for row in rows)
    assert n_tokens / metrics["train_tokens_per_second"] < metrics["train_runtime"] - 3 * 0.1
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(len(rows), rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
@pytest.mark.parametrize("name", sorted(_RUNS))
def test_the_history_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    """The same entries after the same steps with the same figures, but for the times."""
    ours = _history(engine, tmp_path / "whet", _RUNS[name])
    theirs = _history(transformers, tmp_path / "transformers", _RUNS[name])
    assert [(_kind(entry), entry["step"]) for entry in ours] == [(_kind(entry), entry["step"]) for entry in theirs]
    for our, their in zip(ours, theirs, strict=True):
        types = {name: type(value) for name, value in their.items() if name != "total_flos"} | {"epoch": float}
        _assert_holds(our, types, more=_kind(our) == "train_loss")
        same = {key: value for key, value in their.items() if not key.endswith(("_runtime", "_second", "_flos"))}
        # whet sums losses and divides by the count of rows; transformers averages: float32, other roundings
        assert {key: our[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-4)
