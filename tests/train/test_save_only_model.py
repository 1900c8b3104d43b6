"""Checkpoints with the model alone: what they hold, what they serve to, and that no run resumes from them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_runs import (
    Toy,
    arguments,
    assert_same_weights,
    checkpoints,
    losing_metrics,
    read_json,
    span_rows,
    tiny_bert,
    toy_rows,
    toy_trainer,
)
from transformers import AutoModelForQuestionAnswering, TrainerCallback

import engine
from whet.errors import StorageError
from whet.watch import files
from whet.watch.stop import Stopped

SAVES = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class StopAt(TrainerCallback):
    """Sends SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("behind", [False, True])
def test_save_only_model_leaves_the_optimizer_out(tmp_path: Path, behind: bool) -> None:
    toy_trainer(tmp_path / "only", save_async=behind, **SAVES).train()
    toy_trainer(tmp_path / "all", **(SAVES | {"save_only_model": False})).train()
    (only, *_), (full, *_) = ((sorted((tmp_path / name).glob("checkpoint-*"))) for name in ("only", "all"))
    assert names(full) - names(only) == {"state.json", "optimizer.safetensors"}
    assert read_json(only / "trainer_state.json")["global_step"] == 1
    assert_same_weights(_loaded(only), _loaded(full))


def _loaded(folder: Path) -> Any:
    return load_file(folder / "model.safetensors")


def test_a_checkpoint_with_only_the_model_is_loaded_by_transformers(tmp_path: Path) -> None:
    model = tiny_bert()
    engine.Trainer(model, arguments(tmp_path, max_steps=1, **SAVES), train_dataset=span_rows()).train()
    found = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "checkpoint-1")
    assert_same_weights(found, model)


@pytest.mark.parametrize("asked", ["auto", "checkpoint-2"])
def test_a_checkpoint_with_only_the_model_is_not_resumed(tmp_path: Path, asked: str) -> None:
    toy_trainer(tmp_path, max_steps=2, **SAVES).train()
    where = asked if asked == "auto" else str(tmp_path / asked)
    with pytest.raises(StorageError) as found:
        toy_trainer(tmp_path, max_steps=4, **SAVES).train(where)
    text = str(found.value)
    assert "holds only the model" in text
    assert f"--model_name_or_path {tmp_path / 'checkpoint-2'}" in text


def test_auto_names_the_complete_checkpoint_before_one_with_only_the_model(tmp_path: Path) -> None:
    toy_trainer(tmp_path, max_steps=1, **(SAVES | {"save_only_model": False})).train()
    toy_trainer(tmp_path, max_steps=2, **SAVES).train("auto")
    with pytest.raises(StorageError, match=r"(?s)checkpoint-2 holds only.*--resume_from_checkpoint .*checkpoint-1"):
        toy_trainer(tmp_path, **SAVES).train("auto")


@pytest.mark.parametrize("only", [True, False])
def test_an_error_names_a_checkpoint_that_a_run_can_resume_from(tmp_path: Path, only: bool) -> None:
    toy_trainer(tmp_path, max_steps=1, **(SAVES | {"save_only_model": only})).train()
    with pytest.raises(StorageError) as found, files.stored("the results cannot be written", tmp_path):
        raise OSError(28, "No space left on device")
    kept = "there is no checkpoint to resume from" if only else f"checkpoint is {tmp_path / 'checkpoint-1'}"
    assert kept in str(found.value)
    assert found.value.again == ({} if only else {"resume_from_checkpoint": "auto"})


def test_a_signal_saves_a_complete_checkpoint_that_resumes_to_the_same_weights(tmp_path: Path) -> None:
    wanted = toy_trainer(tmp_path / "through", model=Toy(dropout=0.5), num_train_epochs=2, **SAVES)
    wanted.train()
    changes = {"num_train_epochs": 2, "enable_jit_checkpoint": True, **SAVES}
    with pytest.raises(Stopped, match="no completed step is lost"):
        toy_trainer(tmp_path / "out", model=Toy(dropout=0.5), callbacks=[StopAt(3)], **changes).train()
    assert "optimizer.safetensors" in names(tmp_path / "out" / "checkpoint-3")
    resumed = toy_trainer(tmp_path / "out", model=Toy(dropout=0.5), **changes)
    resumed.train("auto")
    assert_same_weights(resumed.model, wanted.model)
    assert "optimizer.safetensors" not in names(tmp_path / "out" / "checkpoint-4")


def test_save_only_model_goes_with_the_best_model_and_a_limit(tmp_path: Path) -> None:
    """As with complete checkpoints: the run ends with the weights of its best evaluation."""
    changes = {
        "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 2, "load_best_model_at_end": True,
        "max_steps": 3, "metric_for_best_model": "score", "greater_is_better": True, "eval_dataset": toy_rows(4),
    }  # fmt: skip
    found = []
    for only in (False, True):
        trainer = toy_trainer(
            tmp_path / str(only),
            compute_metrics=losing_metrics([0.2, 0.9, 0.1]),
            **(SAVES | changes | {"save_only_model": only}),
        )
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / str(only) / "checkpoint-2")
        assert len(checkpoints(tmp_path / str(only))) == 2
        found.append(trainer.model)
    assert_same_weights(found[0], found[1])
