"""What whet.Trainer records in run.jsonl."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hf_runs import arguments, classifier, pad, rows

import whet
from whet.watch import record


def trainer_of(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    """A training of 6 steps that logs every second, evaluates every third and saves every fourth."""
    usual = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    args = arguments(folder, **(usual | changes))
    return whet.Trainer(classifier(), args, pad, rows(), rows(8), callbacks=[*callbacks])


def test_a_training_records_its_steps_evaluations_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_abcdefghijklmnopqrst", "--epochs", "3"])
    trainer = trainer_of(tmp_path, hub_token="hf_abcdefghijklmnopqrst", warmup_steps=2)
    before = list(trainer.callback_handler.callbacks)
    trainer.train()
    assert trainer.callback_handler.callbacks == before, "the callbacks of a script are its own"
    found = record.read(tmp_path)
    assert "abcdef" not in (tmp_path / "run.jsonl").read_text("ascii")
    (attempt,) = found.attempts
    begin, end = attempt.begin, attempt.end
    assert begin["command"] == "python train.py --hub_token '***' --epochs 3"
    assert begin["settings"]["warmup_steps"] == {"value": 2, "from": "script"}
    assert begin["settings"]["weight_decay"] == {"value": 0.0}
    assert (begin["task"], begin["steps"], begin["data"]["rows"]) == (None, 6, 20)
    assert begin["model"]["parameters"] == sum(one.numel() for one in trainer.model.parameters())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(one.step, one.loss, one.learning_rate) for one in found.steps] == [
        (entry["step"], entry["loss"], entry["learning_rate"]) for entry in logged
    ]
    assert found.steps[-1].eta_s == 0.0
    assert all(one.rows_per_s > 0 and one.tokens_per_s is None for one in found.steps)
    spent = {name for one in found.steps for name in one.seconds}
    assert spent == {"data", "forward_backward", "update", "evaluation", "saving"}
    whole_s = found.steps[-1].time - begin["time"]
    assert 0 < sum(sum(one.seconds.values()) for one in found.steps) <= whole_s + 0.01
    assert [one.step for one in found.evaluations] == [3, 6]
    assert "eval_loss" in found.evaluations[0].metrics
    assert [one.folder for one in found.saves] == ["checkpoint-4", "checkpoint-6"]
    assert end["status"] == "finished"
    assert end["metrics"]["train_loss"] == pytest.approx(trainer.state.log_history[-1]["train_loss"])


def test_a_training_that_raises_has_failed_and_one_that_is_interrupted_was_stopped(tmp_path: Path) -> None:
    class Raises(transformers.TrainerCallback):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise self.error

    for error, status in ((ValueError("no rows"), "failed"), (KeyboardInterrupt(), "stopped")):
        with pytest.raises(type(error)):
            trainer_of(tmp_path / status, Raises(error)).train()
        end = record.read(tmp_path / status).last.end
        assert end["status"] == status
    assert record.read(tmp_path / "failed").last.end["error"] == "ValueError: no rows"


def test_a_training_that_saves_nothing_writes_nothing(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_strategy="no").train()
    assert not (tmp_path / "run.jsonl").exists()


def test_the_record_is_left_out_of_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names this machine and the command. The hub itself is not asked: only what it would get counts."""
    asked: list[dict[str, Any]] = []

    def upload(**given: Any) -> Future[None]:
        asked.append(given)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    named = SimpleNamespace(repo_id="someone/model")
    hub = SimpleNamespace(create_repo=lambda *_, **__: named, upload_folder=upload)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = trainer_of(tmp_path, push_to_hub=True, hub_model_id="someone/model")
    trainer.train()
    trainer.push_to_hub()
    assert len(asked) == 3, "two checkpoints, and the model"
    for given in asked:
        assert {"run.jsonl", "checkpoint-*"} <= {*given["ignore_patterns"]}
    assert json.loads((tmp_path / "run.jsonl").read_text("ascii").splitlines()[-1])["status"] == "finished"
